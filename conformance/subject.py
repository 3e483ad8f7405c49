"""What a conformance class tests: a provider found through the registry, or a class that is not registered."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pytest

from pegboard.core.interfaces.contract import Contract
from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.toolkit.text.near_names import did_you_mean

if TYPE_CHECKING:
    from pegboard.core.interfaces.options import Options
    from pegboard.core.registry.records import ProviderRecord
    from pegboard.core.registry.registry import Registry


class SuiteError(pytest.Collector.CollectError):
    """A conformance class that cannot be run as it stands: a collection error, shown without a traceback."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The provider under test. `record` is None for a class that is not registered and derives from none that is."""

    contract: Contract
    name: str
    capabilities: frozenset[str]
    record: ProviderRecord | None
    factory: type[Any] | None = None
    own_options_model: type[Options] | None = None

    @property
    def own_name(self) -> str:
        """The name that requests and configs say: of the registered provider, where there is one."""
        return self.record.name if self.record is not None else self.name

    def load(self) -> type[Any]:
        """Return the class. Raises PluginError where importing it fails."""
        if self.factory is not None:
            return self.factory
        assert self.record is not None
        return self.record.load()

    def options_model(self) -> type[Options]:
        """Return the pydantic model of its options."""
        from pegboard.core.interfaces.options import NoOptions

        if self.own_options_model is not None:
            return self.own_options_model
        return self.record.options_model() if self.record is not None else NoOptions

    def make_options(self, values: Mapping[str, Any]) -> Options:
        """Options checked by the model. Raises ConfigError naming each option that it refuses."""
        from pydantic import ValidationError

        try:
            return self.options_model()(**values)
        except ValidationError as error:
            problems = [Problem(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors()]
            raise ConfigError(Problem(f"options of {self.name}", str(one)) for one in problems) from error


def find_subject(
    contract: str,
    provider: str,
    *,
    factory: type[Any] | None = None,
    provides: frozenset[str] | None = None,
    options_model: type[Options] | None = None,
    registry: Registry | None = None,
) -> Subject:
    """Return the subject that a conformance class describes. Raises SuiteError with a remedy where it describes
    none.
    """
    registry = registry if registry is not None else installed_registry()
    found = registry.contracts.get(contract)
    if found is None:
        hint = did_you_mean(contract, registry.contracts)
        raise SuiteError(" ".join(("there is no contract", repr(contract) + ";", hint)))
    if factory is None:
        if provides is not None or options_model is not None:
            raise SuiteError("`provides` and `options_model` go with `factory`; a provider's stand in its record")
        if not provider:
            raise SuiteError('say what to test: provider = "<name>", as the config would name it')
    if factory is not None and not provider:
        record = _registered_base(registry, contract, factory)
    else:
        record = _named(registry, found, provider)
    if provides is None:
        provides = record.provides if record is not None else frozenset()
    name = provider if factory is None else factory.__name__
    return Subject(found, name, provides, record, factory, options_model)


def installed_registry() -> Registry:
    """Return everything that is installed, read once for as long as sys.path stays the same."""
    return _discover(tuple(sys.path))


@lru_cache(maxsize=1)
def _discover(path: tuple[str, ...]) -> Registry:
    from pegboard.core.registry.registry import Registry

    return Registry.discover()


def _named(registry: Registry, contract: Contract, name: str) -> ProviderRecord:
    record = registry.get(contract.name, name)
    if record is None:
        raise SuiteError(_not_installed(registry, contract, name))
    if record.problem:
        raise SuiteError(f"{record.describe()} cannot be used: {record.problem}")
    return record


def _not_installed(registry: Registry, contract: Contract, name: str) -> str:
    records = registry.providers(contract.name)
    known = f"installed: {', '.join(map(str, records)) or 'none'}"
    hint = did_you_mean(name, [record.name for record in records])
    parts = [f"no {contract.name} provider {name!r} is installed", f"{hint} {known}" if hint else known]
    elsewhere = [record.provider.contract for record in registry.find(name)]
    if elsewhere:
        parts.append(f"{name!r} is a provider of {', '.join(elsewhere)}: use that contract's suite")
    else:
        parts.append("is its package installed (pip install -e .), with an entry point in the group 'pegboard'?")
    parts += [str(broken) for broken in registry.broken]
    return "; ".join(parts)


def _registered_base(registry: Registry, contract: str, factory: type[Any]) -> ProviderRecord | None:
    """Return the record of the nearest class in the factory's ancestry that is registered: a mutant's original."""
    by_class = {record.provider.factory: record for record in registry.providers(contract)}
    for base in factory.__mro__:
        record = by_class.get(f"{base.__module__}:{base.__qualname__}")
        if record is not None:
            return record
    return None
