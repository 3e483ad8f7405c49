"""What plugins have a say in before weights are read: the providers that they ask for, and layers of the KV pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from pegboard.core.interfaces.ahead import KVLayers
from pegboard.core.interfaces.errors import PluginError
from pegboard.toolkit.system.blame import DELIBERATE, describe

if TYPE_CHECKING:
    from pegboard.core.config.select import Selection
    from pegboard.core.interfaces.ahead import KVLayersContext
    from pegboard.core.interfaces.contract import Contract, Ctx, T
    from pegboard.core.interfaces.layers import LayerSpec
    from pegboard.core.registry.hooks import Hooks
    from pegboard.toolkit.system.culprits import Culprits

R = TypeVar("R")


class Providers:
    """Builds the chosen providers of contracts for plugins: each once, for all who ask, and known by its name."""

    def __init__(self, selection: Selection, culprits: Culprits) -> None:
        self._selection = selection
        self.culprits = culprits
        self._made: dict[str, object] = {}

    def __call__(self, contract: Contract[T, Ctx], ctx: Ctx) -> T:
        if contract.name not in self._made:
            choice = self._selection.choose(contract, ctx)
            self._made[contract.name] = self.culprits.know(choice.record, choice.build(ctx))
        found: T = self._made[contract.name]  # type: ignore[assignment]
        return found

    choose = __call__


def further_layers(hooks: Hooks, ctx: KVLayersContext) -> tuple[LayerSpec, ...]:
    """Return the layers that plugins add to the KV pool. Raises PluginError for other answers of `kv_layers`."""
    layers: tuple[LayerSpec, ...] = ()
    for plugin, origin, found in answers(hooks, "kv_layers", lambda found: found, ctx=ctx):
        if found is None:
            continue
        if not isinstance(found, KVLayers):
            raise PluginError(f"kv_layers of plugin {plugin!r} ({origin}): {found!r} is not a KVLayers")
        layers += found.layers
    return layers


def services(hooks: Hooks, hook: str, **given: object) -> dict[str, object]:
    """Return what plugins have built in a hook, by name. Raises PluginError for a hook that raises."""
    found = answers(hooks, hook, lambda found: found or {}, **given)
    return {name: made for *_, named in found for name, made in named.items()}


def answers(hooks: Hooks, hook: str, take: Callable[..., R], **given: object) -> Iterator[tuple[str, str, R]]:
    """Yield what `take` makes of the answer of each implementation of a hook, with its plugin's name and origin. Raises
    PluginError, naming the plugin, for one that raises.
    """
    owners = {id(made): loaded for loaded, made in hooks.built}
    for one in reversed(getattr(hooks.call, hook).get_hookimpls()):
        loaded = owners.get(id(one.plugin))
        plugin = type(one.plugin).__name__ if loaded is None else loaded.plugin.name
        origin = "" if loaded is None else str(loaded.origin)
        try:
            found = take(one.function(*(given[name] for name in one.argnames)))
        except DELIBERATE:
            raise
        except Exception as error:
            text = describe(error, type(one.plugin).__module__)
            raise PluginError(f"{hook} of plugin {plugin!r} ({origin}) raised: {text}", plugin=plugin) from error
        yield plugin, origin, found
