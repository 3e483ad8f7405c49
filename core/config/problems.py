"""From pydantic's errors to problems that say what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pegboard.core.config.merge import Merged
from pegboard.core.config.shape import SWITCHES, Shape, use_path
from pegboard.core.config.suggest import known_key
from pegboard.core.interfaces.contract import Contract
from pegboard.core.interfaces.errors import PegboardError, Problem
from pegboard.core.interfaces.plugin import Plugin
from pegboard.core.registry.records import ProviderRecord
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.system.lazy_names import import_name
from pegboard.toolkit.system.pydantic_models import model_at
from pegboard.toolkit.system.redact import HIDDEN, is_secret
from pegboard.toolkit.text.dotted_trees import dotted
from pegboard.toolkit.text.near_names import or_hint

_SHOWN = 80


def problems_of(error: ValidationError, model: type[BaseModel], merged: Merged, registry: Registry) -> list[Problem]:
    """Return one problem per error, in the config's order, each with the origin of the bad value."""
    out = []
    for one in error.errors(include_url=False):
        path = dotted(one["loc"])
        out.append(Problem(path, _message(one, path, model, merged, registry), merged.origin(path)))
    return out


def _message(error: ErrorDetails, path: str, model: type[BaseModel], merged: Merged, registry: Registry) -> str:
    kind = error["type"]
    if kind == "missing":
        return _missing(path, merged.shape)
    if kind == "extra_forbidden":
        return _unknown_key(error["loc"], path, model, merged, registry)
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        given = HIDDEN if is_secret(path) else shown(error["input"])
        return f"{given} must be a section: keys and values" + _use_hint(path, error["input"], merged.shape)
    text = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if kind in {"value_error", "assertion_error"}:
        return text
    given = HIDDEN if is_secret(path) else shown(error["input"])
    if kind == "bool_type" and path.startswith(f"{SWITCHES}."):
        return f"{given} is wrong: it must be true or false, since this plugin has no options"
    if kind == "string_type" and isinstance(error["input"], int | float):
        return f"{given} is wrong: it must be a text; put it in quotes"
    return f"{given} is wrong: {text[:1].lower()}{text[1:]}"


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _use_hint(path: str, value: object, shape: Shape) -> str:
    """Return the section that a text in its place may mean: its required key, or else the provider's name."""
    if path.startswith(f"{SWITCHES}."):
        return ", or true or false"
    section = shape.section_at(path)
    required = [key for key, field in section.model_fields.items() if field.is_required()] if section else []
    keys = required or (["use"] if path in shape.uses else [])
    return f", such as {{{keys[0]}: {value}}}" if keys and isinstance(value, str) else ""


def _missing(path: str, shape: Shape) -> str:
    parent, _, key = path.rpartition(".")
    section = shape.section_at(parent)
    field = section.model_fields.get(key) if section else None
    text = (field.description or "") if field else ""
    return f"is required. {text}".rstrip() if text else "is required"


def _unknown_key(
    location: tuple[int | str, ...], path: str, model: type[BaseModel], merged: Merged, registry: Registry
) -> str:
    """Return what was probably meant, here or in another section, and the providers whose option this would be."""
    *parents, key = location
    section = model_at(model, parents)
    keys = sorted(section.model_fields) if section else []
    base = dotted(tuple(parents))
    if base == SWITCHES:
        return _unknown_plugin(str(key), registry)
    shape = merged.shape
    if owner := owner_of(path, shape, registry):
        return owner
    contract = shape.uses.get(base) or shape.lists.get(base.partition("[")[0])
    hint = known_key(str(key), merged.get(path), keys, shape)
    parts = ["there is no such key", hint or f"keys here: {', '.join(keys)}"]
    if contract:
        parts.append(_option_of(str(key), contract, str(merged.get(f"{base}.use", "auto")), registry))
    return "; ".join(part for part in parts if part).replace("?; ", "? ")


def _unknown_plugin(name: str, registry: Registry) -> str:
    for broken in registry.broken:
        if broken.name == name:
            return f"plugin {broken}"
    if name in registry.installed:
        return f"plugins.disable leaves out {name!r}: take it from there to use it"
    hint = or_hint(name, registry.installed)
    return f"no plugin {name!r} is installed; {hint}installed: {', '.join(sorted(registry.installed)) or 'none'}"


def owner_of(path: str, shape: Shape, registry: Registry) -> str:
    """Return which plugin, that is off, has declared a key; "" where none has."""
    idle = (loaded.plugin for loaded in registry.plugins if loaded not in shape.active)
    off = [(plugin, f"set plugins.{plugin.name} to true") for plugin in idle]
    for left_out in registry.disabled:
        if plugin := left_out.record():
            off.append((plugin, f"it is switched off (plugins.disable or plugins.{left_out.name})"))
    for plugin, remedy in off:
        if any(f"{path}.".startswith(f"{place}.") for place in _declared(plugin)):
            return f"it needs the plugin {plugin.name!r}: {remedy}"
    return ""


def _declared(plugin: Plugin) -> Iterator[str]:
    """Yield the places of the config that a plugin has; without those of fields that cannot be imported."""
    yield from (contract.config_path for contract in plugin.contracts)
    for section, name in plugin.fields.items():
        try:
            keys = import_name(name).model_fields
        except (Exception, SystemExit):
            continue
        yield from (f"{section}.{key}" if section else key for key in keys)


def _option_of(key: str, contract: Contract, chosen: str, registry: Registry) -> str:
    owners = [record for record in registry.providers(contract.name) if key in _options(record)]
    if not owners:
        return ""
    names = " and ".join(str(one) for one in owners)
    return f"it is an option of {names}, and {use_path(contract)} is {chosen!r}: name the provider to set its options"


def _options(record: ProviderRecord) -> Mapping[str, object]:
    """Options by name; none where the model cannot be imported, since this only looks for a hint."""
    if record.problem:
        return {}
    try:
        return record.options_model().model_fields
    except PegboardError:
        return {}
