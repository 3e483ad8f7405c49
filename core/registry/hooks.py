"""Hooks of all enabled plugins: loaded, validated and ordered by pluggy, and frozen for the steps.

hooks = Hooks.load(resolved.registry, resolved.plugin_options)
hooks.call.configure(config=resolved.engine, origins=resolved.origins)
batch_scheduled = hooks.freeze("batch_scheduled")   # per step: for hook in batch_scheduled: hook(batch)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pluggy

from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.hooks import HookSpecs
from pegboard.core.interfaces.options import NoOptions, Options
from pegboard.core.interfaces.plugin import Plugin
from pegboard.core.registry.discovery import LoadedPlugin
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.system.blame import told
from pegboard.toolkit.system.lazy_names import import_name
from pegboard.toolkit.text.near_names import did_you_mean

HOOK_NAMES = tuple(name for name in vars(HookSpecs) if not name.startswith("_"))


class _Manager(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        """Look for hooks where there may be some. All names of all records would take longer than all else here."""
        if isinstance(plugin, LoadedPlugin) or name.startswith("__"):
            return None
        return super().parse_hookimpl_opts(plugin, name)


class Hooks:
    """One process's hooks. Implementations are called in lock order: built-in plugins first, then by name.

    `manager` is pluggy's. It has the record of every enabled plugin, by its name, and the hook objects of those that
    are on, as ``NAME:module:Class``; the names of disabled plugins are blocked.
    """

    def __init__(self) -> None:
        self.manager: pluggy.PluginManager = _Manager("pegboard")
        self.manager.add_hookspecs(HookSpecs)
        self.built: list[tuple[LoadedPlugin, object]] = []
        """The hooks of plugins, each with its plugin."""

    @classmethod
    def load(cls, registry: Registry, options: Mapping[str, Options] = MappingProxyType({})) -> Hooks:
        """Build the hook classes of every plugin that is on, with its options where the config has any.

        `options` has those by plugin; a name in it also switches on a plugin whose hooks are off by themselves. Raises
        PluginError naming the plugin where one cannot be built.
        """
        hooks = cls()
        for left_out in registry.disabled:
            hooks.manager.set_blocked(left_out.name)
        # pluggy calls the last registered one first
        for loaded in reversed(registry.plugins):
            hooks.manager.register(loaded, loaded.plugin.name)
            if not loaded.active(options):
                continue
            for name in reversed(loaded.plugin.hooks):
                hooks._build(loaded, name, registry.lacking(loaded.plugin), options)
        return hooks

    def _build(self, loaded: LoadedPlugin, name: str, lacking: str, options: Mapping[str, Options]) -> None:
        part = loaded.part(name, "hooks")
        if lacking:
            raise part.wrong(f"cannot be built: {lacking}")
        plugin = loaded.plugin
        with told(part, "cannot be built"):
            cls = import_name(name)
            built = cls(options.get(plugin.name) or options_model(loaded)()) if takes_options(plugin) else cls()
            self.add(built, name=f"{plugin.name}:{name}", plugin=plugin)
        self.built.append((loaded, built))

    def add(self, implementation: object, *, name: str = "", plugin: Plugin | None = None) -> None:
        """Register an object whose methods carry `hookimpl`; it is called before those added earlier.

        Raises PluginError for a method that implements no hook of ours, or takes an argument that the hook has not.
        """
        owner = f"plugin {plugin.name!r}" if plugin else (name or type(implementation).__name__)
        try:
            self.manager.register(implementation, name or None)
            self.manager.check_pending()
        except pluggy.PluginValidationError as error:
            if self.manager.is_registered(implementation):
                self.manager.unregister(implementation)
            unknown = [one for one in _marked(implementation) if one not in HOOK_NAMES]
            hint = f"; {did_you_mean(unknown[0], HOOK_NAMES)}" if unknown else ""
            raise PluginError(f"{owner}: {' '.join(str(error).split())}{hint}") from error

    @property
    def call(self) -> pluggy.HookRelay:
        """pluggy's relay: ``hooks.call.idle()`` calls every implementation with keyword arguments."""
        return self.manager.hook

    def listeners(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return who implements one hook, in the order of the calls: the plugin and the lazy name of the class; "" and
        the object's type for one that was added without a plugin.
        """
        owners = {id(built): loaded.plugin.name for loaded, built in self.built}
        return tuple(
            (owners.get(id(one.plugin), ""), f"{type(one.plugin).__module__}:{type(one.plugin).__qualname__}")
            for one in reversed(getattr(self.manager.hook, name).get_hookimpls())
        )

    def freeze(self, name: str) -> tuple[Callable[..., object], ...]:
        """Return the implementations of one hook in the order of their calls, each taking the hook's arguments by
        position.

        For step hooks, where a call through pluggy costs too much. Raises PluginError for a wrapper, which cannot be
        called like this.
        """
        caller = getattr(self.manager.hook, name)
        arguments = caller.spec.argnames
        frozen = []
        for one in reversed(caller.get_hookimpls()):
            if one.hookwrapper or one.wrapper:
                raise PluginError(f"{one.plugin_name}: step hook {name!r} cannot be a wrapper")
            frozen.append(_positional(one.function, tuple(one.argnames), tuple(arguments)))
        return tuple(frozen)


def takes_options(plugin: Plugin) -> bool:
    """Return whether hook classes of the plugin are built from options."""
    return bool(plugin.config or plugin.fields)


def options_model(loaded: LoadedPlugin) -> type[Options]:
    """Return the model of the options of a plugin's hook classes. Raises PluginError where it cannot be imported."""
    name = loaded.plugin.config
    return loaded.part(name, "options").model(Options) if name else NoOptions


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
