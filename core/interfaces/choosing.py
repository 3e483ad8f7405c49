"""How a plugin's hooks come by the providers of a contract that the plugin declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pegboard.core.interfaces.contract import Contract, Ctx, T


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A chosen provider as another process can build it: `factory` and `options_model` are lazy names, `options` plain
    values.
    """

    factory: str
    options_model: str
    options: Mapping[str, object]


class Chooser(Protocol):
    """Chooses providers as the config says, and builds them."""

    def choose(self, contract: Contract[T, Ctx], context: Ctx) -> T:
        """Return a new instance of the provider that the config names, or else of the best one that supports `context`.

        Its name is told with those of the core's providers, as in `/server_info`. Raises ConfigError where no
        provider can be used.
        """
