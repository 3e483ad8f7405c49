"""The registry: every plugin that is installed and enabled, and the providers that the config can name.

Built once per process from the entry points (`Registry.discover`) or, in tests, from records (`Registry.of`). Reading
it imports plugin records only; a provider's class and options are imported when it is chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property, partial
from operator import attrgetter

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.contracts import CONTRACTS
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.plugin import Plugin
from pegboard.core.registry.discovery import (
    BrokenPlugin,
    DisabledPlugin,
    Found,
    LoadedPlugin,
    check_disabled,
    discover,
)
from pegboard.core.registry.lock import PluginLock
from pegboard.core.registry.records import OWN_DISTRIBUTION, Origin, ProviderRecord, check_plugin, provider_problem
from pegboard.toolkit.text.near_names import did_you_mean, or_hint

UNKNOWN = Contract("", "", Cardinality.ONE, "", "")
"""The contract of a stray provider."""


class Registry:
    """Plugins in lock order, contracts by name, providers by contract and name.

    `conflicts` (two plugins or two providers of one name) and `broken` plugins stop only configs that choose what they
    are about. `use: auto` keeps to the built-in one of two providers, and takes neither of two others.
    """

    def __init__(
        self,
        plugins: Sequence[LoadedPlugin],
        *,
        broken: Sequence[BrokenPlugin] = (),
        disabled: Sequence[DisabledPlugin] = (),
        conflicts: Sequence[str] = (),
    ) -> None:
        self.plugins = tuple(plugins)
        self.broken = tuple(broken)
        self.disabled = tuple(disabled)
        self.contracts: dict[str, Contract] = dict(CONTRACTS)
        """The core's contracts and after them those that plugins declare, by name."""
        contract_conflicts = self._declare()
        self._providers: dict[str, dict[str, ProviderRecord]] = {name: {} for name in self.contracts}
        self._stray: list[ProviderRecord] = []
        self._clashes: dict[tuple[str, str], str] = {}
        self.name_conflicts = tuple(conflicts)
        """Plugins that were left out, because another one has their name."""
        self.conflicts = (*conflicts, *contract_conflicts, *self._index())

    @classmethod
    def discover(cls, disable: Collection[str] = ()) -> Registry:
        """From the installed distributions. Raises ConfigError for an unknown name in `disable`."""
        return cls.from_found(discover(disable))

    @classmethod
    def from_found(cls, found: Found) -> Registry:
        return cls(found.loaded, broken=found.broken, disabled=found.disabled, conflicts=found.conflicts)

    @classmethod
    def of(cls, *plugins: Plugin, distribution: str = OWN_DISTRIBUTION, version: str = "0") -> Registry:
        """Return a registry of exactly these records, which discovers nothing."""
        origin = Origin(distribution, version)
        return cls([LoadedPlugin(check_plugin(plugin, plugin.name), origin) for plugin in plugins])

    def with_plugins(self, *plugins: Plugin, distribution: str, version: str = "0") -> Registry:
        """Return a registry of these records as well, as if another distribution had brought them."""
        more = Registry.of(*plugins, distribution=distribution, version=version)
        return Registry([*self.plugins, *more.plugins], broken=self.broken, disabled=self.disabled)

    def restricted(self, names: Iterable[str]) -> Registry:
        """Only the plugins of these names, in this order: what a plugin lock asks for."""
        by_name = {loaded.plugin.name: loaded for loaded in self.plugins}
        kept = [by_name[name] for name in names if name in by_name]
        return Registry(kept, broken=self.broken, disabled=self.disabled)

    def without(self, names: Collection[str]) -> Registry:
        """Return all but the plugins of these names. Raises ConfigError for a name that is not there."""
        if not names:
            return self
        left_out = [
            DisabledPlugin(loaded.plugin.name, loaded.origin, partial(attrgetter("plugin"), loaded))
            for loaded in self.plugins
            if loaded.plugin.name in names
        ]
        check_disabled(names, self.installed)
        return Registry(
            [loaded for loaded in self.plugins if loaded.plugin.name not in names],
            broken=[broken for broken in self.broken if broken.name not in names],
            disabled=(*self.disabled, *left_out),
        )

    def providers(self, contract: str) -> tuple[ProviderRecord, ...]:
        """Return every provider of a contract, usable or not: highest rank first, then by name."""
        self.contract(contract)
        return tuple(sorted(self._providers[contract].values(), key=lambda one: (-one.provider.rank, one.name)))

    def contract(self, name: str) -> Contract:
        """Return a contract. Raises PluginError where there is none of this name."""
        if name not in self.contracts:
            known = self.contracts
            raise PluginError(f"there is no contract {name!r}; {or_hint(name, known)}known: {', '.join(known)}")
        return self.contracts[name]

    @cached_property
    def lock(self) -> PluginLock:
        """The lock of its plugins. It has a digest of each record, so it is made when it is asked for."""
        return PluginLock.of(self.plugins)

    @property
    def installed(self) -> frozenset[str]:
        """The names of all plugins, broken and disabled ones included."""
        names = [loaded.plugin.name for loaded in self.plugins]
        return frozenset(
            [*names, *(broken.name for broken in self.broken), *(left_out.name for left_out in self.disabled)]
        )

    def get(self, contract: str, name: str) -> ProviderRecord | None:
        return self._providers.get(contract, {}).get(name)

    def find(self, name: str) -> tuple[ProviderRecord, ...]:
        """Return every provider called `name`, whatever its contract."""
        return tuple(by_name[name] for by_name in self._providers.values() if name in by_name)

    def named(self, name: str) -> list[ProviderRecord]:
        """Return what a user means by `name`: contract/provider, a provider of any contract, or all of a plugin's.
        Raises PluginError where there is none.
        """
        contract, slash, provider = name.partition("/")
        plugin = self.plugin(name)
        if slash:
            records = [self.get(contract, provider)]
        else:
            records = [self.get(one.contract, one.name) for one in (plugin.plugin.providers if plugin else ())]
        if found := [record for record in records if record] or list(self.find(name)):
            return found
        for broken in self.broken:
            if broken.name == name:
                raise PluginError(str(broken))
        known = {loaded.plugin.name for loaded in self.plugins}
        known |= {provider.name for loaded in self.plugins for provider in loaded.plugin.providers}
        hint = did_you_mean(name, sorted(known)) or "`pegboard plugins list` shows what is installed"
        raise PluginError(f"no plugin or provider {name!r} is installed; {hint}")

    @property
    def stray(self) -> tuple[ProviderRecord, ...]:
        """Providers of contracts that neither this core nor a plugin has."""
        return tuple(self._stray)

    def plugin(self, name: str) -> LoadedPlugin | None:
        return next((loaded for loaded in self.plugins if loaded.plugin.name == name), None)

    def clash(self, contract: str, name: str) -> str:
        """Return why a provider cannot be chosen by this name, which two have; "" where there is one at most."""
        return self._clashes.get((contract, name), "")

    def lacking(self, plugin: Plugin) -> str:
        """Return why a plugin cannot work without another one that is not there; "" where it has all."""
        missing = [name for name in plugin.requires if self.plugin(name) is None]
        if not missing:
            return ""
        name = missing[0]
        broken = next((str(one) for one in self.broken if one.name == name), "")
        off = f"which is switched off (plugins.disable or plugins.{name})"
        why = broken or (off if name in self.installed else "which is not installed")
        return f"it requires the plugin {name!r}, {why}"

    def _declare(self) -> list[str]:
        """Take in the contracts of plugins. Of two of one name or place in the config, the first one counts."""
        conflicts = []
        for loaded in self.plugins:
            for contract in loaded.plugin.contracts:
                taken = [
                    one.name
                    for one in self.contracts.values()
                    if contract.name == one.name or contract.config_path == one.config_path
                ]
                if taken:
                    conflicts.append(
                        f"the contract {contract.name!r} at {contract.config_path} of {loaded} has the name or the "
                        f"place of the contract {taken[0]!r}; add {loaded.plugin.name!r} to plugins.disable"
                    )
                else:
                    self.contracts[contract.name] = contract
        return conflicts

    def _index(self) -> list[str]:
        conflicts = []
        for loaded in self.plugins:
            for provider in loaded.plugin.providers:
                problem = provider_problem(loaded.plugin, provider, loaded.origin, self.contracts)
                problem = problem or self.lacking(loaded.plugin)
                contract = self.contracts.get(provider.contract, UNKNOWN)
                record = ProviderRecord(provider, contract, loaded.plugin, loaded.origin, problem)
                known = self._providers.get(provider.contract)
                if known is None:
                    self._stray.append(record)
                elif provider.name in known:
                    first = known[provider.name]
                    text = self._clashes[provider.contract, provider.name] = _conflict(first, record)
                    conflicts.append(text)
                    if not first.origin.builtin:
                        known[provider.name] = dataclasses.replace(first, problem=text)
                else:
                    known[provider.name] = record
        return conflicts


def _conflict(first: ProviderRecord, second: ProviderRecord) -> str:
    text = (
        f"two {first.provider.contract} providers are called {first.name!r}: one of plugin {first.plugin.name!r} "
        f"({first.origin}), one of plugin {second.plugin.name!r} ({second.origin})"
    )
    if first.origin.builtin and not second.origin.builtin:
        text += "; a plugin may not shadow a built-in one"
    return f"{text}; add one of the two plugins to plugins.disable, or uninstall it"
