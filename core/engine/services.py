"""Services: what plugins build for the prefix cache, once memory for KV is sized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pegboard.core.config.sources import is_preset
from pegboard.core.interfaces.choosing import ChosenProvider, MemoryContext
from pegboard.core.interfaces.contract import Cardinality, Contract, Ctx, T
from pegboard.toolkit.cache.kv_identity import kept_as, kv_identity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.config.select import Choice
    from pegboard.core.engine.choose import Chosen, Loaded
    from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
    from pegboard.core.registry.hooks import Hooks
    from pegboard.core.registry.records import ProviderRecord


def memory_services(
    chosen: Chosen, loaded: Loaded, hooks: Hooks, cache: Choice[PrefixCache, PrefixCacheContext]
) -> dict[str, object]:
    """Return what plugins have built for the prefix cache, by name. Raises what their hooks raise."""
    ctx = MemoryContext(
        config=chosen.resolved.engine,
        said=said(chosen.resolved),
        cache=cache.name,
        provides=cache.provides,
        pool=loaded.memory.pool,
        num_pages=loaded.memory.num_pages,
        layers=chosen.spec.layers + chosen.further,
        dtype=chosen.kv_dtype,
        device=chosen.model.device,
        identity=partial(_identity, chosen, loaded),
        choose=_Chooser(chosen),
        requiring=partial(requiring, chosen.resolved),
    )
    services: dict[str, object] = {}
    for found in hooks.call.memory_services(ctx=ctx):
        services.update(found)
    return services


def said(resolved: ResolvedConfig) -> frozenset[str]:
    """Return the paths of the keys that the operator has set."""
    return frozenset(path for path, origin in resolved.origins.items() if not is_preset(origin))


def requiring(resolved: ResolvedConfig, contract: str, of: str, capability: str) -> tuple[list[str], list[str]]:
    """Return which providers of a contract require a capability of another's: the names of those that the config may
    choose, and of all that are installed.
    """

    def names(records: Iterable[ProviderRecord]) -> list[str]:
        needs = {one: {(need.contract, need.capability) for need in one.provider.requires} for one in records}
        return [one.name for one, needed in needs.items() if (of, capability) in needed]

    return names(resolved.candidates[contract]), names(resolved.registry.providers(contract))


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
