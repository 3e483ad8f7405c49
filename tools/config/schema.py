"""The JSON schema of configs, for editors: discriminated unions over all providers, built only here."""

from __future__ import annotations

import operator
import types
from typing import Annotated, Any, Literal, Union

from pydantic import Field

from pegboard.core.config.merge import Merged, default_layers
from pegboard.core.config.option_models import tolerant, with_options
from pegboard.core.config.section import AUTO, Section, UseSection
from pegboard.core.config.shape import SWITCHES, Shape, use_path
from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.options import SectionFields
from pegboard.core.registry.records import ProviderRecord
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.system.pydantic_models import derived


def schema(registry: Registry) -> dict[str, Any]:
    """JSON schema of the config, with the options of every installed provider, told apart by `use`.

    Imports every options model; a provider whose model cannot be imported takes any option.
    """
    switches = {loaded.plugin.name: True for loaded in registry.plugins}
    return _Schema(registry, Shape.of(registry, switches)).model("").model_json_schema()


class _Schema:
    def __init__(self, registry: Registry, shape: Shape) -> None:
        self._registry = registry
        self._shape = shape

    def model(self, path: str) -> type[SectionFields]:
        """Return the section at `path` with every union of providers in its place."""
        model = self._shape.section_at(path)
        assert model is not None
        fields: dict[str, object] = {}
        for key, info in model.model_fields.items():
            below = f"{path}.{key}" if path else key
            description, required = info.description, info.is_required()
            if below in self._shape.lists:
                entry: Any = Union[str, self._union(below, self._shape.lists[below])]  # noqa: UP007 - built at run time
                fields[key] = (types.GenericAlias(list, (entry,)), Field(default=[], description=description))
            elif below in self._shape.uses:
                fields[key] = (self._union(below, self._shape.uses[below]), _optional(required, description))
            elif path == SWITCHES and key != "disable":
                options = self._shape.section_at(below) or derived("NoOptions", Section)
                fields[key] = (operator.or_(bool, options), Field(default=True, description=description))
            elif self._shape.section_at(below) is not None:
                fields[key] = (self.model(below), _optional(required, description))
        return derived(model.__name__, model, fields) if fields else model

    def _union(self, path: str, contract: Contract) -> object:
        core = self.model(path) if self._shape.section_at(path) else UseSection
        default = self._default_use(contract)
        variants = [
            _tagged(core, path, record, record.name == default)
            for record in self._registry.providers(contract.name)
            if not record.problem
        ]
        if contract.cardinality is not Cardinality.MANY:
            use = (Literal[AUTO], AUTO if default == AUTO else ...)
            variants.append(derived(f"{contract.name}_auto", core, {"use": use}))
        if not variants:
            return core
        return Annotated[Union[tuple(variants)], Field(discriminator="use")] if len(variants) > 1 else variants[0]  # noqa: UP007

    def _default_use(self, contract: Contract) -> object:
        """Return what counts for a contract where a config says nothing; "" for a list."""
        if contract.cardinality is Cardinality.MANY:
            return ""
        return Merged(default_layers(self._shape), self._shape).get(use_path(contract), AUTO)


def _optional(required: bool, description: str | None) -> object:
    return Field(description=description) if required else Field(default_factory=dict, description=description)


def _tagged(core: type[SectionFields], path: str, record: ProviderRecord, default: bool) -> type[SectionFields]:
    """Return the section where `use` is this provider; `default` is the one that is meant without a `use`."""
    try:
        section = with_options(core, path, record)
    except PegboardError:
        section = tolerant(core)
    description = record.provider.summary
    name = record.name
    field = Field(default=name, description=description) if default else Field(description=description)
    use = (Literal.__getitem__(name), field)
    return derived(f"{record.provider.contract}_{record.name}", section, {"use": use})
