"""Checks of what requests say about tools, in whichever format. Whatever is odd is a 400 with its path, before anything
else sees it. How a format spells tools and the choice among them is for its API plugin to read::

    def find(where: str, tool: Mapping[str, object]) -> FunctionSource:
        return FunctionSource(where, tool, "input_schema")

    tools = Tools(checked_functions(body.tools, find))
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.json_value import JsonObject, JsonValue
from pegboard.toolkit.parsing.output_parser import ToolFunction

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 512 * 1024
"""Most characters of all tools together, as JSON."""
MAX_SCHEMA_DEPTH = 64

Choice = Literal["auto", "none", "required"]

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    "additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_STRINGS = ("title", "description", "pattern", "format", "$ref", "$id", "$schema", "$comment", "$anchor")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_KEYWORDS = frozenset(
    {"type", "enum", "required", *_SCHEMA_MAPS, *_SCHEMAS, *_SCHEMA_LISTS, *_STRINGS, *_NUMBERS, *_COUNTS}
)


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """Where a tool of a request has its function: the object with `name`, `description` and `strict`, that object's
    path in the body, and what the schema of the parameters is called in it.
    """

    path: str
    fields: Mapping[str, object]
    schema_key: str = "parameters"


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """How many tools a request may have, and the most characters of a name: by default as OpenAI has it. Parsers read
    names of up to 128 characters.
    """

    tools: int = MAX_TOOLS
    name: int = 64


OPENAI_LIMITS = ToolLimits()


def checked_functions(
    tools: object, find: Callable[[str, Mapping[str, object]], FunctionSource], limits: ToolLimits = OPENAI_LIMITS
) -> tuple[ToolFunction, ...]:
    """Return the functions of `tools`, a body's list, as `Tools.functions` has them. `find` gets a tool's path and the
    tool, and returns its function. Raises InvalidRequest with the path of what is wrong.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise wrong("tools", "must be a list")
    if len(tools) > limits.tools:
        raise wrong("tools", f"may have at most {limits.tools} entries, got {len(tools)}")
    sources: list[FunctionSource] = []
    functions: list[ToolFunction] = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise wrong(f"tools.{i}", "must be an object")
        sources.append(find(f"tools.{i}", tool))
        functions.append(_function(sources[-1], limits.name))
    seen: set[str] = set()
    for source, function in zip(sources, functions, strict=True):
        if function["name"] in seen:
            raise wrong(f"{source.path}.name", f"{function['name']!r} is there twice")
        seen.add(function["name"])
    if functions and _size(functions) > MAX_TOOLS_CHARS:
        raise wrong("tools", f"may have at most {MAX_TOOLS_CHARS} characters of JSON together")
    return tuple(functions)


def named_choice(name: object, where: str, functions: Sequence[ToolFunction]) -> tuple[Choice, str]:
    """Return the choice of one function, by the name that the body has at `where`. Raises InvalidRequest for a name
    that none of `functions` has.
    """
    if not isinstance(name, str):
        raise wrong(where, "must be a string")
    if not any(one["name"] == name for one in functions):
        raise wrong(where, f"no tool is called {name[:64]!r}")
    return "required", name


def check_choice(choice: Choice, where: str, functions: Sequence[ToolFunction]) -> None:
    """Raise InvalidRequest, naming `where`, for a call that is required where there are no functions."""
    if choice == "required" and not functions:
        raise wrong(where, "a call is required, but there are no tools")


def wrong(where: str, message: str) -> InvalidRequest:
    """Return the refusal of what stands at this path of a body."""
    return InvalidRequest(f"{where}: {message}", param=where)


def outline(function: ToolFunction) -> ToolFunction:
    """Return a function whose arguments have no more than names, simple types, and those that must be there: what any
    grammar can hold, where the rest is left to the model.
    """
    schema = function.get("parameters") or {}
    described, required = schema.get("properties"), schema.get("required")
    needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    properties: dict[str, JsonValue] = {}
    for name, one in described.items() if isinstance(described, Mapping) else ():
        kind = one.get("type") if isinstance(one, Mapping) else None
        properties[name] = {"type": kind} if isinstance(kind, str) else {}
    return {**function, "parameters": {"type": "object", "properties": properties, "required": needed}}


def _function(source: FunctionSource, longest: int) -> ToolFunction:
    path, fields = source.path, source.fields
    name = fields.get("name")
    if not isinstance(name, str) or len(name) > longest or not _NAME.fullmatch(name):
        raise wrong(f"{path}.name", f"must be 1 to {longest} characters of A-Z, a-z, 0-9, _, . and -")
    function: ToolFunction = {"name": name}
    description = fields.get("description")
    if description is not None:
        if not isinstance(description, str):
            raise wrong(f"{path}.description", "must be a string")
        function["description"] = description
    parameters = fields.get(source.schema_key)
    function["parameters"] = (
        {"type": "object", "properties": {}}
        if parameters is None
        else _parameters(f"{path}.{source.schema_key}", parameters)
    )
    strict = fields.get("strict")
    if strict is not None:
        if not isinstance(strict, bool):
            raise wrong(f"{path}.strict", "must be true or false")
        function["strict"] = strict
    return function


def _parameters(path: str, schema: object) -> JsonObject:
    if not isinstance(schema, dict):
        raise wrong(path, "must be a JSON schema: an object")
    if schema.get("type") not in ("object", None):
        raise wrong(f"{path}.type", "must be object: arguments have names")
    if check_schema(schema, path):
        schema = _without_nulls(schema)
    return schema if "type" in schema else {"type": "object", **schema}


def _without_nulls(schema: JsonObject) -> dict[str, JsonValue]:
    """Return a schema that was checked, without keywords that are null."""
    made: dict[str, JsonValue] = {}
    for key, value in schema.items():
        if key in _SCHEMA_MAPS and isinstance(value, dict):
            made[key] = {name: _cleaned(inner) for name, inner in value.items()}
        elif key in (*_SCHEMA_LISTS, "items") and isinstance(value, list):
            made[key] = [_cleaned(inner) for inner in value]
        elif value is not None or key not in _KEYWORDS:
            made[key] = _cleaned(value) if key in _SCHEMAS else value
    return made


def _cleaned(schema: JsonValue) -> JsonValue:
    return _without_nulls(schema) if isinstance(schema, dict) else schema


def check_schema(schema: object, path: str) -> bool:
    """Raise InvalidRequest, with the path below `path`, for an invalid JSON schema: keywords of the wrong type, and
    schemas nested too deeply. Unknown keywords pass, and so do known ones that are null, as some clients write what is
    not there; True where there are any.

    By hand, because `jsonschema.Draft202012Validator.check_schema` needs 0.2 ms per subschema, where this needs 3 us:
    the half megabyte that tools may have holds 40,000 of them, and eight seconds on the server's event loop stop it for
    all clients. It also refuses earlier drafts, which clients send (a list in `items`, a boolean in
    `exclusiveMinimum`), lets an empty `enum` pass, and takes 1.3 s to import with its optional formats.
    """
    left: list[tuple[object, str, int]] = [(schema, path, 1)]
    nulls = False
    while left:
        one, where, depth = left.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            raise wrong(where, "must be a JSON schema: an object, or a boolean")
        if depth > MAX_SCHEMA_DEPTH:
            raise wrong(path, f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        if None in one.values():
            one = {key: value for key, value in one.items() if value is not None or key not in _KEYWORDS}
            nulls = True
        _check_keywords(one, where)
        left += [(below, at, depth + 1) for below, at in _subschemas(one, where)]
    return nulls


def _subschemas(schema: dict[str, Any], where: str) -> Iterator[tuple[Any, str]]:
    for key in _SCHEMA_MAPS:
        if key in schema:
            if not isinstance(schema[key], dict):
                raise wrong(f"{where}.{key}", "must be an object of JSON schemas")
            yield from ((below, f"{where}.{key}.{name}") for name, below in schema[key].items())
    for key in _SCHEMAS:
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            yield schema[key], f"{where}.{key}"
    for key in (*_SCHEMA_LISTS, "items"):
        if key in schema and not (key == "items" and not isinstance(schema[key], list)):
            if not isinstance(schema[key], list) or not (schema[key] or key in ("items", "prefixItems")):
                raise wrong(f"{where}.{key}", "must be a list of JSON schemas that is not empty")
            yield from ((below, f"{where}.{key}.{i}") for i, below in enumerate(schema[key]))


def _check_keywords(schema: dict[str, Any], where: str) -> None:
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not kinds or not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
            raise wrong(f"{where}.type", f"must be one or several of {', '.join(sorted(_TYPES))}")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise wrong(f"{where}.enum", "must be a list that is not empty")
    if "required" in schema and not _are(schema["required"], str):
        raise wrong(f"{where}.required", "must be a list of names")
    for key in _STRINGS:
        if key in schema and not isinstance(schema[key], str):
            raise wrong(f"{where}.{key}", "must be a string")
    for key in _NUMBERS:
        # Draft 4 has booleans for the exclusive ones.
        if key in schema and not isinstance(schema[key], (int, float)):
            raise wrong(f"{where}.{key}", "must be a number")
    for key in _COUNTS:
        value = schema.get(key, 0)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < 0:
            raise wrong(f"{where}.{key}", "must be a whole number that is not negative")


def _are(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _size(functions: Sequence[ToolFunction]) -> int:
    try:
        text = json.dumps(functions, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        why = "are nested too deeply" if isinstance(error, RecursionError) else f"are not valid JSON: {error}"
        raise wrong("tools", why) from None
    return len(text)
