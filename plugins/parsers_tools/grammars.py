"""Grammars that calls have to follow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pegboard.core.interfaces.json_value import JsonObject, JsonValue
from pegboard.core.interfaces.sampling import Grammar
from pegboard.toolkit.parsing.output_parser import ToolFunction


def chosen(tools: Sequence[ToolFunction], name: str) -> list[ToolFunction]:
    """Return all functions, or the one that is named."""
    return [one for one in tools if not name or one["name"] == name]


def parameters_of(function: ToolFunction) -> dict[str, JsonValue]:
    """Return the schema of a function's arguments, which are an object whatever it leaves open."""
    schema = function.get("parameters")
    return {"type": "object", **(schema if isinstance(schema, Mapping) else {})}


def properties_of(function: ToolFunction) -> JsonObject:
    """Return the schemas of a function's arguments, by name."""
    found = parameters_of(function).get("properties")
    return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class Around:
    """What stands around a call's arguments: `begin`, with the name for ``{name}`` (as JSON) or ``{bare}``, and `end`;
    and around all calls of an answer: `first`, `between` and `last`.
    """

    begin: str
    end: str
    first: str = ""
    between: str = ""
    last: str = ""
    trailing: bool = False
    """Whether what stands between two calls may stand after the last one. Where models write the same before a call
    and before other text, this is how one that wants to write such text comes to an end rather than to another call.
    """


def tagged(
    functions: Sequence[ToolFunction], around: Around, *, parallel: bool, required: bool, trigger: str
) -> Grammar:
    """Return a grammar of calls in such a form, and nothing else. Where calls are free to be made, any text may stand
    around each of them from a `trigger` on, and the schemas of functions that are not strict are left to the model.
    """
    begin, end = around.begin, around.end
    if not required:
        # Here each call is an answer's only one, as far as its form goes.
        begin, end = around.first + begin, end + around.last
    structures = []
    for one in functions:
        opening = begin.replace("{name}", json.dumps(one["name"])).replace("{bare}", one["name"])
        schema = parameters_of(one) if required or one.get("strict") is True else {"type": "object"}
        structures.append({"begin": opening, "schema": schema, "end": end})
    tag: dict[str, object] = {"structures": structures}
    if required:
        texts = {"separator": around.between, "begin": around.first, "end": around.last}
        tag |= {**texts, "at_least_one": True, "trailing_separator": around.trailing}
    else:
        tag["triggers"] = [trigger]
    if not parallel:
        tag["stop_after_first"] = True
    return Grammar("structural_tag", json.dumps(tag, ensure_ascii=False))


def any_call(functions: Sequence[ToolFunction], arguments: str) -> Grammar:
    """Return one JSON object that is a call of one of these functions."""
    calls = []
    definitions = {}
    for index, one in enumerate(functions):
        # References within a schema start at its root, which is elsewhere now: at a place that every backend finds.
        definitions[f"f{index}"] = _moved(parameters_of(one), f"#/$defs/f{index}")
        properties = {"name": {"const": one["name"]}, arguments: {"$ref": f"#/$defs/f{index}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", arguments],
                "additionalProperties": False,
            }
        )
    schema = {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": definitions}
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


def _moved(node: JsonValue, root: str) -> JsonValue:
    if isinstance(node, Mapping):
        return {key: _moved_ref(value, root) if key == "$ref" else _moved(value, root) for key, value in node.items()}
    return [_moved(one, root) for one in node] if isinstance(node, list) else node


def _moved_ref(value: JsonValue, root: str) -> JsonValue:
    if isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return root + value[1:]
    return _moved(value, root)
