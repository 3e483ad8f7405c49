"""How a plugin's hooks come by providers of the contracts that the plugin declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol

from pegboard.core.interfaces.contract import Contract, Ctx, T

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.layers import LayerSpec


@dataclass(frozen=True, slots=True)
class Blueprint:
    """How another process builds a chosen provider: lazy names of `factory` and `options_model`; plain `options`."""

    factory: str
    options_model: str
    options: Mapping[str, object]


class NamedProvider(Protocol):
    """A chosen provider of any contract: its name in the config, and its capabilities."""

    @property
    def name(self) -> str: ...
    @property
    def provides(self) -> frozenset[str]: ...


class Chooser(Protocol):
    """Chooses providers as the config says, and builds them."""

    def choose(self, contract: Contract[T, Ctx], context: Ctx) -> T:
        """Return a new instance of the provider that the config names, or else of the best one that supports `context`.

        Its name is told with those of the core's providers, as in `/server_info`. Raises ConfigError where no
        provider can be used.
        """


@dataclass(frozen=True, slots=True)
class ChosenProvider(Generic[T, Ctx]):
    """A chosen provider that is not built yet: its name, its class, and what builds it."""

    name: str
    cls: type[T]
    build: Callable[[Ctx], T]


class ProviderChooser(Protocol):
    """Chooses providers as the config says, and leaves it to the caller to build them."""

    def __call__(self, contract: Contract[T, Ctx], context: Ctx) -> Sequence[ChosenProvider[T, Ctx]]:
        """Return the providers of a list in the config's order, or the one of another contract, told as `Chooser` tells
        them. Raises ConfigError where one does not support `context`.
        """


@dataclass(frozen=True, slots=True)
class MemoryContext:
    """What `memory_services` gets: KV memory as it was sized, and the prefix cache that is about to be built.

    `config` is the EngineConfig; `said` are the paths of keys that the operator has set, no preset. `cache` is the
    cache's name, `provides` its capabilities. `pool` keeps KV of `layers` in `dtype`, on `device`, in `num_pages`
    pages. `identity` returns a digest of all that KV depends on beside tokens and namespace; it reads the weights, and
    may raise OSError. `choose` chooses providers. `requiring(contract, of, capability)` names the providers of a
    contract that require a capability of another: those that the config may choose, and all that are installed.
    """

    config: Any
    said: frozenset[str]
    cache: str
    provides: frozenset[str]
    pool: KVPool
    num_pages: int
    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    device: torch.device
    identity: Callable[[], bytes]
    choose: ProviderChooser
    requiring: Callable[[str, str, str], tuple[Sequence[str], Sequence[str]]]
