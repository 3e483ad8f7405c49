"""Model names: those that plugins add to the config's, by the hook `model_names`."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pegboard.toolkit.system.blame import in_words

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import ModelInfo

logger = logging.getLogger(__name__)


ADAPTER = "adapter"
"""In `params` of a request: the adapter that it wants, by name."""


class AddedModels(abc.ABC):
    """A service (`EngineClient.services`) that knows where further names of a model come from."""

    @abc.abstractmethod
    def root_of(self, name: str) -> str | None:
        """Return the directory of what is served under a name beside the model; None for other names."""


def root_of(services: Mapping[str, object], name: str) -> str | None:
    """Return the directory of what is served under a name beside the model; None for the model itself."""
    known = (one for one in services.values() if isinstance(one, AddedModels))
    return next((root for one in known if (root := one.root_of(name)) is not None), None)


class ModelNames:
    """Asks the hooks. One that raises, or answers with what are not names, adds none; the log has its first error."""

    def __init__(self, hooks: Sequence[Callable[[], object]] = ()) -> None:
        self._hooks = tuple(hooks)
        self._failed: set[int] = set()

    def added_to(self, info: ModelInfo) -> ModelInfo:
        """Return what is known of the model, with all of its names."""
        found = [name for place, hook in enumerate(self._hooks) for name in self._asked(place, hook)]
        if not found:
            return info
        names = dict.fromkeys((*info.names, *found))
        return replace(info, other_names=tuple(names)[1:])

    def _asked(self, place: int, hook: Callable[[], object]) -> Sequence[str]:
        try:
            return _names(hook())
        except Exception as error:
            if place not in self._failed:
                self._failed.add(place)
                name = getattr(hook, "__qualname__", repr(hook))
                logger.exception("the hook model_names (%s) failed, and adds no name: %s", name, in_words(error))
            return ()


def _names(answer: object) -> Sequence[str]:
    """Return the answer of a hook; None stands for no name. Raises TypeError for what is not a list of names."""
    if answer is None:
        return ()
    if not isinstance(answer, (list, tuple)) or not all(isinstance(name, str) and name for name in answer):
        raise TypeError(f"it answered {answer!r:.200}, which is not a list of names")
    return answer
