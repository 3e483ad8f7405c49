"""Plugin records joined to where they came from, and the checks that a record must pass."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.plugin import API_VERSION, BODY_CONTRACTS, INDEX, BodyField, Plugin, Provider
from pegboard.toolkit.system.blame import describe, place_of, told
from pegboard.toolkit.system.lazy_names import import_name, is_lazy_name
from pegboard.toolkit.text.near_names import did_you_mean

if TYPE_CHECKING:
    from pegboard.core.interfaces.options import Options

OWN_DISTRIBUTION = "pegboard"
_NAME = re.compile(r"[a-z][a-z0-9_.-]*")
_FIELD = re.compile(r"[a-z][a-z0-9_]{0,63}")
_KINDS = (int, str, bool, float)
_NAME_RULE = "names are lower case: a letter, then letters, digits, '_', '-' or '.'"


class MissingExtra(PluginError):
    """A library that a provider needs is not installed, and its plugin says which command installs it."""

    def __init__(self, module: str, command: str) -> None:
        self.module = module
        self.command = command
        super().__init__(f"{module} is not installed; to install it: {command}")

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str]]:
        return type(self), (self.module, self.command)


@dataclass(frozen=True, slots=True)
class Origin:
    """The installed distribution that brings a plugin."""

    distribution: str
    version: str

    @property
    def builtin(self) -> bool:
        return self.distribution == OWN_DISTRIBUTION

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True, eq=False)
class ProviderRecord:
    """A provider together with its contract and its plugin. `problem` says why it cannot be chosen ("" where it can).

    A registry makes one per provider, so two are the same only if they are one object.
    """

    provider: Provider
    contract: Contract
    plugin: Plugin
    origin: Origin
    problem: str = ""

    @property
    def name(self) -> str:
        return self.provider.name

    @property
    def provides(self) -> frozenset[str]:
        return self.provider.provides

    def __str__(self) -> str:
        """Return how error messages cite it: ``radix (pegboard 0.1.0)``."""
        return f"{self.name} ({self.origin})"

    def load(self) -> type[Any]:
        """Return the provider's class. Raises MissingExtra, or PluginError with the cause where the import fails, and
        where no engine could be built with what is there.
        """
        name = self.provider.factory
        cls = self._import(name)
        interface = import_name(self.contract.interface)
        if not (isinstance(cls, type) and issubclass(cls, interface)):
            raise self._wrong(f"{name} is not a subclass of {self.contract.interface}")
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            raise self._wrong(f"{name} lacks {', '.join(missing)}, which {self.contract.interface} asks for")
        if problem := _call_problem(cls):
            raise self._wrong(f"{name} must be built as {cls.__name__}(options, context), but {problem}")
        return cls

    def options_model(self) -> type[Options]:
        """Return the pydantic model of its options; NoOptions where it has none. Raises as `load` does."""
        from pegboard.core.interfaces.options import NoOptions, Options

        name = self.provider.config
        if not name:
            return NoOptions
        model = self._import(name)
        if not (isinstance(model, type) and issubclass(model, Options)):
            raise self._wrong(f"{name} is not a subclass of pegboard.core.interfaces.options:Options")
        return model

    @property
    def conformance(self) -> tuple[str, ...]:
        """Lazy names of its own test classes."""
        return _several(self.provider.conformance)

    def describe(self) -> str:
        return f"{self.provider.contract} {self.name!r} of plugin {self.plugin.name!r} ({self.origin})"

    @property
    def key(self) -> str:
        """Where the config names it: ``sampler.use``, or the list."""
        path = self.contract.config_path
        return path if self.contract.cardinality is Cardinality.MANY else f"{path}.use"

    def told(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Around a call into its code: what that raises becomes a PluginError with this record's name."""
        return told(self, doing)

    def error(self, doing: str, error: BaseException) -> PluginError:
        """Return what to raise for an `error` of its code: MissingExtra where a library is not there."""
        if isinstance(error, ModuleNotFoundError):
            module = (error.name or "").partition(".")[0]
            if module in self.plugin.extras:
                return MissingExtra(module, self.plugin.extras[module])
        module = self.provider.factory.partition(":")[0]
        return self._wrong(f"{doing} failed: {describe(error, module)}", place_of(error, module))

    def _wrong(self, what: str, place: str = "") -> PluginError:
        return PluginError(
            f"{self.key}: {self.describe()}: {what}",
            plugin=self.plugin.name,
            distribution=self.origin.distribution,
            version=self.origin.version,
            path=self.key,
            place=place,
        )

    def _import(self, name: str) -> Any:
        with self.told(f"importing {name}"):
            return import_name(name)


def _call_problem(cls: type[Any]) -> str:
    """Return why ``cls(options, context)`` cannot be called, "" where it can."""
    try:
        inspect.signature(cls).bind(None, None)
    except TypeError as error:
        return f"its constructor does not take these: {error}"
    except ValueError:
        # A class in C need not tell.
        return ""
    return ""


def check_plugin(value: object, entry_point: str) -> Plugin:
    """Return the record, or PluginError saying why it is none. Compatibility is checked per provider."""
    if not isinstance(value, Plugin):
        raise PluginError(f"the entry point must name a pegboard.core.interfaces.Plugin, not a {type(value).__name__}")
    if value.name != entry_point:
        raise PluginError(f"the entry point is called {entry_point!r}, but its record {value.name!r}: make them equal")
    for name in (value.name, *(provider.name for provider in value.providers)):
        if not _NAME.fullmatch(name):
            raise PluginError(f"bad name {name!r}: {_NAME_RULE}")
    if value.name == "disable":
        raise PluginError("bad name 'disable': plugins.disable is a key of the config")
    lazy = [("config", value.config)] if value.config else []
    lazy += [("hooks", hook) for hook in value.hooks] + [("fields", name) for name in value.fields.values()]
    for contract in value.contracts:
        lazy += [("contracts", contract.interface)]
        lazy += [("contracts", name) for name in (contract.suite, contract.section) if name]
    for where, name in lazy:
        if not is_lazy_name(name):
            raise PluginError(f"bad lazy name {name!r} in {where}: it must read 'package.module:Name'")
    return value


def provider_problem(plugin: Plugin, provider: Provider, origin: Origin, contracts: Mapping[str, Contract]) -> str:
    """Return why this provider cannot be chosen with these contracts, "" where it can. The first reason of several."""
    return next(_problems(plugin, provider, origin, contracts), "")


def _problems(plugin: Plugin, provider: Provider, origin: Origin, contracts: Mapping[str, Contract]) -> Iterator[str]:
    if _major(plugin.api) != _major(API_VERSION):
        yield (
            f"it is written for plugin API {plugin.api}, this Pegboard has {API_VERSION}; "
            f"install a matching {origin.distribution}"
        )
    contract = contracts.get(provider.contract)
    if contract is None:
        yield " ".join(
            filter(None, (f"there is no contract {provider.contract!r};", did_you_mean(provider.contract, contracts)))
        )
        return
    if _major(provider.contract_version) != _major(contract.version):
        yield (
            f"it implements {contract.name} {provider.contract_version}, this Pegboard has {contract.version}; "
            f"install a matching {origin.distribution}"
        )
    tests = (("conformance", name) for name in _several(provider.conformance))
    for what, name in (("factory", provider.factory), ("config", provider.config), *tests):
        if (name or what == "factory") and not is_lazy_name(name):
            yield f"bad lazy name {name!r} in {what}: it must read 'package.module:Name'"
    for capability in sorted(provider.provides):
        yield from _capability_problem(contract, capability, plugin, "provides")
    for requirement in provider.requires:
        needed = contracts.get(requirement.contract)
        if needed is None:
            hint = did_you_mean(requirement.contract, contracts)
            yield f"it requires the unknown contract {requirement.contract!r}; {hint}".removesuffix("; ")
        elif requirement.capability is not None:
            yield from _capability_problem(needed, requirement.capability, None, "requires")
    yield from _body_problems(provider)


def _body_problems(provider: Provider) -> Iterator[str]:
    if provider.body and provider.contract not in BODY_CONTRACTS:
        yield f"it declares fields of bodies, which only providers of {' and '.join(BODY_CONTRACTS)} get"
    known: set[str] = set()
    fields: tuple[object, ...] = provider.body
    for field in fields:
        if not isinstance(field, BodyField):
            yield f"its body must have BodyFields, not {field!r}"
            return
        if not _FIELD.fullmatch(field.name) or field.name == INDEX:
            rule = f"it must be a letter and then letters, digits or '_', all lower case, 64 at most, and not {INDEX!r}"
            yield f"bad name {field.name!r} of a field of bodies: {rule}"
        if field.kind not in _KINDS:
            yield f"the field {field.name!r} of bodies has the kind {field.kind!r}, and not int, str, bool or float"
        if field.name in known:
            yield f"it declares the field {field.name!r} of bodies twice"
        known.add(field.name)


def _capability_problem(contract: Contract, capability: str, owner: Plugin | None, verb: str) -> Iterator[str]:
    """Capabilities stand in the contract's table; a third party's own ones carry its plugin's name in front."""
    prefix, dot, rest = capability.partition(".")
    if capability in contract.capabilities:
        return
    if dot and rest and prefix and (owner is None or capability.startswith(f"{owner.name}.")):
        return
    known = ", ".join(contract.capabilities) or "none"
    own = f"; one of your own must read '{owner.name}.{rest or capability}'" if owner else ""
    yield f"it {verb} {capability!r}, which is not a capability of {contract.name} (known: {known}){own}"


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(filter(None, (names,))) if isinstance(names, str) else tuple(names)


def _major(version: str) -> str:
    return version.partition(".")[0]
