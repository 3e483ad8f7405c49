"""Saying what a config is and what it could be: resolved values with their origin, the list of keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pegboard.core.config.compose import ResolvedConfig
from pegboard.core.config.merge import Merged, default_layers
from pegboard.core.config.section import UseSection
from pegboard.core.config.shape import CORE, Shape, place_of_entry, use_path
from pegboard.core.registry.records import ProviderRecord
from pegboard.toolkit.system.redact import redact
from pegboard.toolkit.text.dotted_trees import leaves, origin_of


@dataclass(frozen=True, slots=True)
class ShownValue:
    """One key of a resolved config. `origin` is what set it; `note` says more, such as what may serve `auto`."""

    path: str
    value: object
    origin: str
    note: str = ""


def show(resolved: ResolvedConfig) -> list[ShownValue]:
    """Return every key with its value (but for secrets) and where that came from, in the order of the sections."""
    automatic = {
        use_path(contract): ", ".join(record.name for record in resolved.candidates[contract.name])
        for contract in resolved.shape.uses.values()
        if contract.name not in resolved.named
    }
    out = []
    for path, value in leaves(redact(resolved.engine.model_dump(mode="json"))):
        note = f"the first that fits of: {automatic[path]}" if path in automatic else ""
        out.append(ShownValue(path, value, origin_of(path, resolved.origins), note))
    return out


@dataclass(frozen=True, slots=True)
class Key:
    """One key that a config may have. `required` keys have no default."""

    path: str
    type: str
    default: str
    meaning: str
    required: bool = False


def core_keys_of(shape: Shape = CORE, path: str = "") -> Iterator[Key]:
    """Yield every key of the sections, in their order, with the value that the default preset, or the plugin of a
    section, gives it.
    """
    preset = Merged(default_layers(shape), shape)
    section = shape.section_at(path)
    for name, info in section.model_fields.items() if section else ():
        below = f"{path}.{name}" if path else name
        if shape.section_at(below) is not None:
            yield from core_keys_of(shape, below)
            continue
        key = _key(below, info)
        value = preset.get(below)
        yield key if value is None else replace(key, default=_written(value))


def option_keys(record: ProviderRecord) -> Sequence[Key]:
    """Return the options of one provider, by their place in the config."""
    return keys_of(record.options_model(), place_of_entry(record.contract))


def keys_of(options: type[BaseModel], place: str) -> Sequence[Key]:
    """Return the keys of a model of options, by their place in the config."""
    return [_key(f"{place}.{name}", info) for name, info in options.model_fields.items()]


def body_keys(record: ProviderRecord) -> Sequence[Key]:
    """Return the fields of request bodies that a provider declares; none of one that cannot be chosen."""
    found = []
    for field in () if record.problem else record.provider.body:
        kind = type_text(field.kind)
        found.append(Key(field.name, f"{kind} or list of {kind}s" if field.each else kind, "", field.meaning))
    return found


def _key(path: str, info: FieldInfo) -> Key:
    required = info.is_required()
    default = "" if required else _written(info.get_default(call_default_factory=True))
    return Key(
        path, type_text(info.annotation, info.metadata), default, " ".join((info.description or "").split()), required
    )


def _written(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list | frozenset | set):
        return "[" + ", ".join(_written(one) for one in value) + "]"
    return str(value)


_PLAIN = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "",
    Any: "any",
}
_BOUNDS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))


def type_text(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """Return a type as an operator reads it: ``integer > 0``, ``string``, ``list of strings``, ``auto or cpu``."""
    origin = getattr(annotation, "__origin__", None)
    arguments = getattr(annotation, "__args__", ())
    if hasattr(annotation, "__metadata__"):
        return type_text(origin, (*annotation.__metadata__, *metadata))
    if origin is Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if arguments and origin in {tuple, list, set, frozenset}:
        inner = arguments[0]
        if isinstance(inner, type) and issubclass(inner, UseSection):
            return "list of providers"
        return f"list of {_plural(type_text(inner))}"
    if arguments and origin in {dict, Mapping}:
        return f"map of {type_text(arguments[0])} to {type_text(arguments[1])}"
    if arguments:
        # Bounds of an optional number are the number's.
        texts = (type_text(argument, metadata if argument in (int, float) else ()) for argument in arguments)
        return " or ".join(text for text in texts if text)
    text = _PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation)))
    return f"{text}{_bounds(metadata)}"


def _plural(text: str) -> str:
    """Return a type in the plural, with its bounds after that: ``integers > 0``."""
    return re.sub(r"(?= [><≥≤] )|$", "s", text, count=1)


def _bounds(metadata: Sequence[object]) -> str:
    flat = [part for one in metadata for part in (one.metadata if hasattr(one, "metadata") else [one])]
    found = [f"{sign} {getattr(part, name)}" for part in flat for name, sign in _BOUNDS if hasattr(part, name)]
    return f" {', '.join(found)}" if found else ""
