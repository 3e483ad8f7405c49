"""Hooks of all enabled plugins: loaded, validated and ordered by pluggy, and frozen for the steps.

hooks = Hooks.load(resolved.registry)
hooks.call.configure(config=resolved.engine)
batch_scheduled = hooks.freeze("batch_scheduled")   # per step: for hook in batch_scheduled: hook(batch)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pluggy

from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.hooks import HookSpecs
from pegboard.core.interfaces.plugin import Plugin
from pegboard.core.registry.blame import describe, place_of, told
from pegboard.core.registry.discovery import LoadedPlugin
from pegboard.core.registry.lazy import import_name
from pegboard.core.registry.names import did_you_mean
from pegboard.core.registry.registry import Registry

HOOK_NAMES = tuple(name for name in vars(HookSpecs) if not name.startswith("_"))


class Hooks:
    """One process's hooks. Implementations are called in lock order: built-in plugins first, then by name."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("pegboard")
        self._manager.add_hookspecs(HookSpecs)
        self.built: list[tuple[LoadedPlugin, object]] = []
        """The hooks of plugins, each with its plugin."""

    @classmethod
    def load(cls, registry: Registry) -> Hooks:
        """Build the hook classes of every plugin. Raises PluginError naming the plugin where one cannot be."""
        hooks = cls()
        # pluggy calls the last registered one first
        for loaded in reversed(registry.plugins):
            for name in reversed(loaded.plugin.hooks):
                with told(_Owner(loaded, name), "cannot be built"):
                    built = import_name(name)()
                    hooks.add(built, name=f"{loaded.plugin.name}:{name}", plugin=loaded.plugin)
                hooks.built.append((loaded, built))
        return hooks

    def add(self, implementation: object, *, name: str = "", plugin: Plugin | None = None) -> None:
        """Register an object whose methods carry `hookimpl`; it is called before those added earlier.

        Raises PluginError for a method that implements no hook of ours, or takes an argument that the hook has not.
        """
        owner = f"plugin {plugin.name!r}" if plugin else (name or type(implementation).__name__)
        try:
            self._manager.register(implementation, name or None)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            if self._manager.is_registered(implementation):
                self._manager.unregister(implementation)
            unknown = [one for one in _marked(implementation) if one not in HOOK_NAMES]
            hint = f"; {did_you_mean(unknown[0], HOOK_NAMES)}" if unknown else ""
            raise PluginError(f"{owner}: {' '.join(str(error).split())}{hint}") from error

    @property
    def call(self) -> pluggy.HookRelay:
        """pluggy's relay: ``hooks.call.configure(config=...)`` calls every implementation with keyword arguments."""
        return self._manager.hook

    def freeze(self, name: str) -> tuple[Callable[..., object], ...]:
        """Return the implementations of one hook in the order of their calls, each taking the hook's arguments by
        position.

        For step hooks, where a call through pluggy costs too much. Raises PluginError for a wrapper, which cannot be
        called like this.
        """
        caller = getattr(self._manager.hook, name)
        arguments = caller.spec.argnames
        frozen = []
        for one in reversed(caller.get_hookimpls()):
            if one.hookwrapper or one.wrapper:
                raise PluginError(f"{one.plugin_name}: step hook {name!r} cannot be a wrapper")
            frozen.append(_positional(one.function, tuple(one.argnames), tuple(arguments)))
        return tuple(frozen)


@dataclass(frozen=True, slots=True)
class _Owner:
    """The hooks of one plugin, for errors."""

    loaded: LoadedPlugin
    name: str

    def error(self, doing: str, error: BaseException) -> PluginError:
        plugin, origin = self.loaded.plugin.name, self.loaded.origin
        module = self.name.partition(":")[0]
        return PluginError(
            f"hooks {self.name} of plugin {plugin!r} ({origin}) {doing}: {describe(error, module)}; "
            f"add {plugin!r} to plugins.disable to go on without it",
            plugin=plugin,
            distribution=origin.distribution,
            version=origin.version,
            path="plugins.disable",
            place=place_of(error, module),
        )


def _positional(
    function: Callable[..., object], wanted: tuple[str, ...], given: tuple[str, ...]
) -> Callable[..., object]:
    """Return the function itself where it takes all arguments in order, else one that passes on those it takes."""
    if wanted == given:
        return function
    places = tuple(given.index(name) for name in wanted)
    return lambda *values: function(*(values[place] for place in places))


def _marked(implementation: object) -> list[str]:
    return [name for name, member in inspect.getmembers(implementation) if hasattr(member, "pegboard_impl")]
