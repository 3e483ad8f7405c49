"""Memory services: what plugins build for the prefix cache, once memory for KV is sized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pegboard.core.engine.reserving import services
from pegboard.core.interfaces.choosing import ChosenProvider, MemoryContext
from pegboard.core.interfaces.contract import Cardinality, Contract, Ctx, T
from pegboard.toolkit.cache.kv_identity import kept_as, kv_identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pegboard.core.config.select import Choice
    from pegboard.core.engine.choose import Chosen, Loaded
    from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
    from pegboard.core.registry.hooks import Hooks


def memory_services(
    chosen: Chosen, loaded: Loaded, hooks: Hooks, cache: Choice[PrefixCache, PrefixCacheContext]
) -> dict[str, object]:
    """Return what plugins have built for the prefix cache, by name. Raises PluginError for a hook that raises."""
    ctx = MemoryContext(
        config=chosen.resolved.engine,
        said=chosen.resolved.said,
        cache=cache.name,
        provides=cache.provides,
        pool=loaded.memory.pool,
        num_pages=loaded.memory.num_pages,
        layers=chosen.spec.layers + chosen.further,
        dtype=chosen.kv_dtype,
        device=chosen.model.device,
        identity=partial(_identity, chosen, loaded),
        choose=_Chooser(chosen),
        requiring=chosen.resolved.requiring,
    )
    return services(hooks, "memory_services", ctx=ctx)


def _identity(chosen: Chosen, loaded: Loaded) -> bytes:
    layers = chosen.spec.layers + chosen.further
    return kv_identity(chosen.model, layers, numerics=loaded.numerics, kept=kept_as(loaded.memory.pool, chosen.model))


@dataclass(frozen=True, slots=True)
class _Chooser:
    """A ProviderChooser. What it builds is known by its name, should it raise."""

    chosen: Chosen

    def __call__(self, contract: Contract[T, Ctx], context: Ctx) -> Sequence[ChosenProvider[T, Ctx]]:
        selection = self.chosen.selection
        many = contract.cardinality is Cardinality.MANY
        choices = selection.choose_all(contract, context) if many else (selection.choose(contract, context),)
        return [ChosenProvider(one.name, one.cls, partial(self._build, one)) for one in choices]

    def _build(self, choice: Choice[T, Ctx], context: Ctx) -> T:
        return self.chosen.culprits.know(choice.record, choice.build(context))
