"""The JSON schema of configs, for editors: discriminated unions over all providers, built only here."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

from pydantic import Field

from pegboard.core.config.merge import Merged
from pegboard.core.config.option_models import derived, tolerant, with_options
from pegboard.core.config.section import AUTO, Section, UseSection
from pegboard.core.config.sections import EngineConfig
from pegboard.core.config.shape import LIST_SECTIONS, USE_SECTIONS, section_at, use_path
from pegboard.core.config.sources import DEFAULT_PRESET, read_preset
from pegboard.core.interfaces.contracts import Contract
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.registry.records import ProviderRecord
from pegboard.core.registry.registry import Registry


def schema(registry: Registry) -> dict[str, Any]:
    """JSON schema of the config, with the options of every installed provider, told apart by `use`.

    Imports every options model; a provider whose model cannot be imported takes any option.
    """
    sections = {path: _union(path, contract, registry) for path, contract in USE_SECTIONS.items()}
    entries = {path: _union(path, contract, registry, auto=False) for path, contract in LIST_SECTIONS.items()}
    return _schema_model(EngineConfig, "", sections, entries).model_json_schema()


def _schema_model(
    model: type[Section], path: str, sections: Mapping[str, object], entries: Mapping[str, object]
) -> type[Section]:
    """`model` with every union of providers in its place."""
    fields: dict[str, object] = {}
    for key, info in model.model_fields.items():
        below = f"{path}.{key}" if path else key
        child = section_at(below)
        description = info.description
        if below in entries:
            entry: Any = Union[str, entries[below]]  # noqa: UP007 - built at run time
            fields[key] = (types.GenericAlias(list, (entry,)), Field(default=[], description=description))
        elif below in sections:
            fields[key] = (sections[below], _optional(info.is_required(), description))
        elif child is not None:
            nested = _schema_model(child, below, sections, entries)
            fields[key] = (nested, _optional(info.is_required(), description))
    return derived(model.__name__, model, **fields) if fields else model


def _union(path: str, contract: Contract, registry: Registry, *, auto: bool = True) -> object:
    core = section_at(path) or UseSection
    nested = {one: _union(one, other, registry) for one, other in USE_SECTIONS.items() if one.startswith(f"{path}.")}
    core = _schema_model(core, path, nested, {}) if nested else core
    default = default_use(contract) if auto else ""
    variants = [
        _tagged(core, path, record, record.name == default)
        for record in registry.providers(contract.name)
        if not record.problem
    ]
    if auto:
        use = (Literal[AUTO], AUTO if default == AUTO else ...)
        variants.append(derived(f"{contract.name}_auto", core, use=use))
    if not variants:
        return core
    return Annotated[Union[tuple(variants)], Field(discriminator="use")] if len(variants) > 1 else variants[0]  # noqa: UP007


def _optional(required: bool, description: str | None) -> object:
    return Field(description=description) if required else Field(default_factory=dict, description=description)


def default_use(contract: Contract) -> object:
    """Return what the default preset says, or `auto` where it says nothing. For a list, the list."""
    return Merged([read_preset(DEFAULT_PRESET)]).get(use_path(contract), AUTO)


def _tagged(core: type[Section], path: str, record: ProviderRecord, default: bool) -> type[Section]:
    """Return the section where `use` is this provider; `default` is the one that is meant without a `use`."""
    try:
        section = with_options(core, path, record)
    except PegboardError:
        section = tolerant(core)
    description = record.provider.summary
    name = record.name
    field = Field(default=name, description=description) if default else Field(description=description)
    use = (Literal.__getitem__(name), field)
    return derived(f"{record.provider.contract}_{record.name}", section, use=use)
