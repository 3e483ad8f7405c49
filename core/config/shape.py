"""The shape of a config: its sections, looked up by dotted path, and the contracts that have a place in it.

`CORE` is the core's own. ``Shape.of(registry, {"acme": True})`` has the fields and contracts of plugins too, for a
config that has acme on; its ``section_at("server")`` is the model of a section.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from pydantic import Field, TypeAdapter, ValidationError

from pegboard.core.config.section import Section, UseSection
from pegboard.core.config.sections import EngineConfig
from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.contracts import CONTRACTS
from pegboard.core.interfaces.options import SectionFields, SectionT
from pegboard.core.registry.discovery import LoadedPlugin
from pegboard.core.registry.hooks import options_model
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.system.pydantic_models import derived, with_default
from pegboard.toolkit.text.dotted_trees import nested

SWITCHES = "plugins"
"""The section with the switches and options of plugins."""
_BOOLEAN = TypeAdapter(bool)


class Shape:
    """What a config may have: `model` is the whole, `active` are the plugins that count."""

    def __init__(
        self,
        model: type[EngineConfig] = EngineConfig,
        contracts: Mapping[str, Contract] = CONTRACTS,
        active: Iterable[LoadedPlugin] = (),
    ) -> None:
        self.model = model
        self.contracts = contracts
        self.active = tuple(active)
        places = {contract.config_path: contract for contract in contracts.values()}
        self.lists = {path: one for path, one in places.items() if one.cardinality is Cardinality.MANY}
        """Path of each list of providers, and the contract of it."""
        self.uses = {path: one for path, one in places.items() if path not in self.lists}
        """Path of each section that chooses one provider, and the contract of it."""
        self.section_at = functools.cache(self._section_at)

    @classmethod
    def of(cls, registry: Registry, switches: Mapping[str, object] = MappingProxyType({})) -> Shape:
        """Return the core's shape with what plugins add to it: built-in ones, and those that the config switches on.

        `switches` is what `switches_of` a config says. Raises PluginError, naming the plugin, where something of one
        cannot be imported or has another one's place.
        """
        active = [one for one in registry.plugins if one.active(switches)]
        contracts = dict(CONTRACTS)
        extension = _Extension()
        for loaded in active:
            extension.add_fields(loaded)
            for contract in loaded.plugin.contracts:
                if registry.contracts[contract.name] is contract:
                    contracts[contract.name] = contract
                    extension.add_contract(loaded, contract)
            extension.add_options(loaded, named=loaded.plugin.name in switches)
        for left_out in registry.disabled:
            if switches.get(left_out.name) is False:
                extension.add_switch(left_out.name, f"{left_out.name}.")
        return cls(extension.applied(), contracts, active)

    def is_section(self, path: str) -> bool:
        """Return whether a section may stand at `path`; what is said of a plugin may be one."""
        of_plugin = path.rpartition(".")[0] == SWITCHES and path != f"{SWITCHES}.disable"
        return self.section_at(path) is not None or of_plugin

    def core_keys(self, path: str) -> frozenset[str]:
        """Keys of the section at `path` that are the section's own: no provider's option may be called so."""
        model = self.section_at(path)
        return frozenset(model.model_fields) if model else frozenset()

    def defaults(self) -> Iterator[dict[str, object]]:
        """Yield, as plain trees, the providers of plugins' contracts that count where a config names none."""
        for contract in self.contracts.values():
            if contract.name not in CONTRACTS and contract.cardinality is not Cardinality.MANY:
                yield nested(f"{contract.config_path}.use", contract.default)

    def _section_at(self, path: str) -> type[SectionFields] | None:
        """Return the model of the section at `path` ("" is the whole), None where no section stands."""
        return _section_of(self.model, path)


def _section_of(model: type[SectionFields] | None, path: str) -> type[SectionFields] | None:
    for key in path.split(".") if path else ():
        model = subsection(model, key) if model else None
    return model


def subsection(model: type[SectionFields], key: str) -> type[SectionFields] | None:
    """Return the model of the section under `key`, None where a plain value stands."""
    field = model.model_fields.get(key)
    annotation = field.annotation if field else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, SectionFields) else None


def use_path(contract: Contract) -> str:
    """Return where the config names the provider: ``attention.use``, or the list itself."""
    return contract.config_path if contract.cardinality is Cardinality.MANY else f"{contract.config_path}.use"


def place_of_entry(contract: Contract) -> str:
    """Return where a provider's options stand: ``attention``, or ``apis[]`` of a list."""
    return f"{contract.config_path}[]" if contract.cardinality is Cardinality.MANY else contract.config_path


def switches_of(values: Mapping[str, object]) -> dict[str, object]:
    """Return what a config, as a plain tree, says of each plugin that it names: False, True or its options."""
    section = values.get(SWITCHES)
    named = section.items() if isinstance(section, Mapping) else ()
    return {name: _switch(value) for name, value in named if name != "disable"}


def _switch(value: object) -> object:
    """Return a boolean for what pydantic takes for one, such as "off"."""
    with contextlib.suppress(ValidationError):
        return _BOOLEAN.validate_python(value)
    return value


class _Extension:
    """What plugins add to the core's sections: further bases of some, further keys of some."""

    def __init__(self) -> None:
        self._bases: dict[str, list[type[SectionFields]]] = {}
        self._keys: dict[str, dict[str, tuple[object, object]]] = {}
        self._owners: dict[str, LoadedPlugin] = {}

    def add_fields(self, loaded: LoadedPlugin) -> None:
        for path, name in loaded.plugin.fields.items():
            fields = loaded.part(name, "fields").model(SectionFields)
            for key in fields.model_fields:
                self._claim(loaded, path, key)
            self._bases.setdefault(path, []).append(fields)

    def add_contract(self, loaded: LoadedPlugin, contract: Contract) -> None:
        parent, _, key = contract.config_path.rpartition(".")
        about = _sentence(contract.summary)
        if contract.cardinality is Cardinality.MANY:
            self._add(loaded, parent, key, tuple[UseSection, ...], Field(default=(), description=about))
            return
        section: type[Section] = UseSection
        if contract.section:
            own = loaded.part(contract.section, "section").model(SectionFields)
            section, about = derived(own.__name__, UseSection, mixins=[own]), inspect.getdoc(own) or about
        self._add(loaded, parent, key, section, Field(default_factory=section, description=about))

    def add_options(self, loaded: LoadedPlugin, *, named: bool) -> None:
        """Add the section of a plugin with options; of any other a switch, where the config names it."""
        name, about = loaded.plugin.name, _sentence(loaded.plugin.summary or loaded.plugin.name)
        if loaded.plugin.config:
            model = options_model(loaded)
            section = derived(model.__name__, Section, mixins=[model])
            self._add(loaded, SWITCHES, name, section, Field(default_factory=section, description=about))
        elif named:
            self.add_switch(name, about)

    def add_switch(self, name: str, about: str) -> None:
        self._keys.setdefault(SWITCHES, {})[name] = (bool, Field(default=True, description=about))

    def applied(self) -> type[EngineConfig]:
        """Return the core's config with all that was added. Raises PluginError where a section is not there."""
        missing = {*self._bases, *self._keys}
        whole = self._extended(EngineConfig, "", missing)
        for path in missing:
            loaded = next(owner for place, owner in self._owners.items() if place.rpartition(".")[0] == path)
            raise loaded.wrong(f"{loaded} declares keys of {path}, and there is no such section")
        return whole

    def _add(self, loaded: LoadedPlugin, parent: str, key: str, kind: object, field: object) -> None:
        self._claim(loaded, parent, key)
        self._keys.setdefault(parent, {})[key] = (kind, field)

    def _claim(self, loaded: LoadedPlugin, parent: str, key: str) -> None:
        path = f"{parent}.{key}" if parent else key
        section = _section_of(EngineConfig, parent)
        if section is not None and key in section.model_fields:
            raise loaded.wrong(f"{loaded} declares {path}, which is a key of the core")
        if path in self._owners:
            raise loaded.wrong(f"{loaded} declares {path}, and so does {self._owners[path]}")
        self._owners[path] = loaded

    def _extended(self, model: type[SectionT], path: str, left: set[str]) -> type[SectionT]:
        """Return `model`, the section at `path`, with what is added to it and to the sections below."""
        left.discard(path)
        if path in self._bases:
            model = derived(model.__name__, model, mixins=self._bases[path])
        below: dict[str, object] = dict(self._keys.get(path, {}))
        if below:
            model, below = derived(model.__name__, model, below), {}
        for key, info in model.model_fields.items():
            child = subsection(model, key)
            wide = self._extended(child, f"{path}.{key}" if path else key, left) if child else None
            if wide is not child:
                below[key] = (wide, with_default(info, wide))
        return derived(model.__name__, model, below) if below else model


def sections_of(shape: Shape, path: str = "") -> Iterator[tuple[str, type[SectionFields]]]:
    """Yield every section with its path, the whole ("") first."""
    model = shape.section_at(path)
    assert model is not None
    yield path, model
    for key in model.model_fields:
        below = f"{path}.{key}" if path else key
        if shape.section_at(below) is not None:
            yield from sections_of(shape, below)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].removesuffix('.')}."


CORE = Shape()
"""The core's own shape, without what plugins add."""
