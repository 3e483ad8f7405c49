"""Checks of what requests say about tools. Whatever is odd is a 400 with its path, before anything else sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pegboard.core.interfaces.errors import InvalidRequest

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 512 * 1024
"""Most characters of all tools together, as JSON."""
MAX_SCHEMA_DEPTH = 64

Choice = Literal["auto", "none", "required"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
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


def checked_functions(tools: Any, wrapper: str, schema_key: str) -> tuple[dict[str, Any], ...]:
    """The functions of `tools`, in OpenAI's form. `wrapper` is the key that a tool has its function under ("" for
    none), `schema_key` what the schema of the parameters is called. Raises InvalidRequest with the path of what is
    wrong.
    """
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise _wrong("tools", "must be a list")
    if len(tools) > MAX_TOOLS:
        raise _wrong("tools", f"may have at most {MAX_TOOLS} entries, got {len(tools)}")
    functions = tuple(_function(f"tools.{i}", tool, wrapper, schema_key) for i, tool in enumerate(tools))
    seen: set[str] = set()
    for i, function in enumerate(functions):
        if function["name"] in seen:
            raise _wrong(_below(f"tools.{i}", wrapper, "name"), f"{function['name']!r} is there twice")
        seen.add(function["name"])
    if functions and _size(functions) > MAX_TOOLS_CHARS:
        raise _wrong("tools", f"may have at most {MAX_TOOLS_CHARS} characters of JSON together")
    return functions


def outline(function: Mapping[str, Any]) -> dict[str, Any]:
    """A function whose arguments have no more than names, simple types, and those that must be there: what any grammar
    can hold, where the rest is left to the model.
    """
    schema = function.get("parameters") or {}
    needed = [name for name in schema.get("required") or () if isinstance(name, str)]
    properties: dict[str, Any] = {}
    for name, one in (schema.get("properties") or {}).items():
        kind = one.get("type") if isinstance(one, Mapping) else None
        properties[name] = {"type": kind} if isinstance(kind, str) else {}
    return {**function, "parameters": {"type": "object", "properties": properties, "required": needed}}


def _function(where: str, tool: Any, wrapper: str, schema_key: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise _wrong(where, "must be an object")
    kind = tool.get("type", "function" if wrapper else None)
    if kind not in ("function", "custom", None) or (kind == "custom" and schema_key == "parameters"):
        raise _wrong(f"{where}.type", f"{str(kind)[:64]!r} is not supported, function is")
    source: Any = tool.get(wrapper) if wrapper else tool
    if not isinstance(source, Mapping):
        raise _wrong(f"{where}.{wrapper}", "must be an object")
    name = source.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(_below(where, wrapper, "name"), "must be 1 to 64 characters of A-Z, a-z, 0-9, _, . and -")
    function: dict[str, Any] = {"name": name}
    description = source.get("description")
    if description is not None:
        if not isinstance(description, str):
            raise _wrong(_below(where, wrapper, "description"), "must be a string")
        function["description"] = description
    parameters = source.get(schema_key)
    path = _below(where, wrapper, schema_key)
    function["parameters"] = (
        {"type": "object", "properties": {}} if parameters is None else _parameters(path, parameters)
    )
    strict = source.get("strict")
    if strict is not None:
        if not isinstance(strict, bool):
            raise _wrong(_below(where, wrapper, "strict"), "must be true or false")
        function["strict"] = strict
    return function


def _parameters(path: str, schema: Any) -> dict[str, Any]:
    if not isinstance(schema, dict):
        raise _wrong(path, "must be a JSON schema: an object")
    if schema.get("type", "object") != "object":
        raise _wrong(f"{path}.type", "must be object: arguments have names")
    check_schema(schema, path)
    return schema if "type" in schema else {"type": "object", **schema}


def check_schema(schema: Any, path: str) -> None:
    """Raise InvalidRequest, with the path below `path`, for an invalid JSON schema: keywords of the wrong type, and
    schemas nested too deeply. Unknown keywords pass.

    By hand, because `jsonschema.Draft202012Validator.check_schema` needs 0.2 ms per subschema, where this needs 3 us:
    the half megabyte that tools may have holds 40,000 of them, and eight seconds on the server's event loop stop it for
    all clients. It also refuses earlier drafts, which clients send (a list in `items`, a boolean in
    `exclusiveMinimum`), lets an empty `enum` pass, and takes 1.3 s to import with its optional formats.
    """
    left: list[tuple[Any, str, int]] = [(schema, path, 1)]
    while left:
        one, where, depth = left.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            raise _wrong(where, "must be a JSON schema: an object, or a boolean")
        if depth > MAX_SCHEMA_DEPTH:
            raise _wrong(path, f"is nested more than {MAX_SCHEMA_DEPTH} levels deep")
        _check_keywords(one, where)
        left += [(below, at, depth + 1) for below, at in _subschemas(one, where)]


def _subschemas(schema: dict[str, Any], where: str) -> Iterator[tuple[Any, str]]:
    for key in _SCHEMA_MAPS:
        if key in schema:
            if not isinstance(schema[key], dict):
                raise _wrong(f"{where}.{key}", "must be an object of JSON schemas")
            yield from ((below, f"{where}.{key}.{name}") for name, below in schema[key].items())
    for key in _SCHEMAS:
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            yield schema[key], f"{where}.{key}"
    for key in (*_SCHEMA_LISTS, "items"):
        if key in schema and not (key == "items" and not isinstance(schema[key], list)):
            if not isinstance(schema[key], list) or not (schema[key] or key in ("items", "prefixItems")):
                raise _wrong(f"{where}.{key}", "must be a list of JSON schemas that is not empty")
            yield from ((below, f"{where}.{key}.{i}") for i, below in enumerate(schema[key]))


def _check_keywords(schema: dict[str, Any], where: str) -> None:
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not kinds or not all(isinstance(kind, str) and kind in _TYPES for kind in kinds):
            raise _wrong(f"{where}.type", f"must be one or several of {', '.join(sorted(_TYPES))}")
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        raise _wrong(f"{where}.enum", "must be a list that is not empty")
    if "required" in schema and not _are(schema["required"], str):
        raise _wrong(f"{where}.required", "must be a list of names")
    for key in _STRINGS:
        if key in schema and not isinstance(schema[key], str):
            raise _wrong(f"{where}.{key}", "must be a string")
    for key in _NUMBERS:
        # Draft 4 has booleans for the exclusive ones.
        if key in schema and not isinstance(schema[key], (int, float)):
            raise _wrong(f"{where}.{key}", "must be a number")
    for key in _COUNTS:
        value = schema.get(key, 0)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < 0:
            raise _wrong(f"{where}.{key}", "must be a whole number that is not negative")


def _are(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def _size(functions: Sequence[Mapping[str, Any]]) -> int:
    try:
        text = json.dumps(functions, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        why = "are nested too deeply" if isinstance(error, RecursionError) else f"are not valid JSON: {error}"
        raise _wrong("tools", why) from None
    return len(text)


def chat_choice(value: Any, functions: Sequence[Mapping[str, Any]]) -> tuple[Choice, str]:
    """`tool_choice` of chat completions: the choice, and the function that it names or ""."""
    if isinstance(value, Mapping) and value.get("type") == "function":
        function = value.get("function")
        if not isinstance(function, Mapping):
            raise _wrong("tool_choice.function", "must be an object")
        return _named(function.get("name"), "tool_choice.function.name", functions)
    return _plain_choice(value, functions)


def responses_choice(value: Any, functions: Sequence[Mapping[str, Any]]) -> tuple[Choice, str]:
    """`tool_choice` of responses, where a named choice has the name beside its type."""
    if isinstance(value, Mapping) and value.get("type") == "function":
        return _named(value.get("name"), "tool_choice.name", functions)
    return _plain_choice(value, functions)


def allowed_tools(
    value: Any, functions: tuple[dict[str, Any], ...], wrapper: str
) -> tuple[tuple[dict[str, Any], ...], Any]:
    """The functions that a `tool_choice` leaves, and the choice among them: OpenAI's ``allowed_tools`` names those that
    may be called, with `auto` or `required` for a mode; any other choice leaves all. `wrapper` is the key that chats
    have the list and its functions under, "" for responses.
    """
    if not isinstance(value, Mapping) or value.get("type") != "allowed_tools":
        return functions, value
    where = _below("tool_choice", wrapper and "allowed_tools")
    source: Any = value.get("allowed_tools") if wrapper else value
    if not isinstance(source, Mapping):
        raise _wrong(where, "must be an object")
    if source.get("mode") not in ("auto", "required"):
        raise _wrong(f"{where}.mode", 'must be "auto" or "required"')
    tools = source.get("tools")
    if not isinstance(tools, list):
        raise _wrong(f"{where}.tools", "must be a list")
    if len(tools) > MAX_TOOLS:
        raise _wrong(f"{where}.tools", f"may have at most {MAX_TOOLS} entries, got {len(tools)}")
    names = {_allowed(f"{where}.tools.{i}", tool, wrapper, functions) for i, tool in enumerate(tools)}
    left = tuple(one for one in functions if one["name"] in names)
    if source["mode"] == "required":
        _need_tools("required", left, f"{where}.tools")
    return left, source["mode"]


def _allowed(where: str, tool: Any, wrapper: str, functions: Sequence[Mapping[str, Any]]) -> str:
    if not isinstance(tool, Mapping):
        raise _wrong(where, "must be an object")
    if tool.get("type") != "function":
        raise _wrong(f"{where}.type", f"{str(tool.get('type'))[:64]!r} is not supported, function is")
    function: Any = tool.get(wrapper) if wrapper else tool
    if not isinstance(function, Mapping):
        raise _wrong(f"{where}.{wrapper}", "must be an object")
    path = _below(where, wrapper, "name")
    _named(function.get("name"), path, functions)
    return str(function["name"])


def anthropic_choice(value: Any, functions: Sequence[Mapping[str, Any]]) -> tuple[Choice, str, bool]:
    """`tool_choice` of messages: the choice, the function that it names or "", and whether calls may be parallel."""
    if value is None:
        return "auto", "", True
    if not isinstance(value, Mapping):
        raise _wrong("tool_choice", "must be an object")
    single = value.get("disable_parallel_tool_use", False)
    if not isinstance(single, bool):
        raise _wrong("tool_choice.disable_parallel_tool_use", "must be true or false")
    kind = value.get("type")
    if kind == "tool":
        return *_named(value.get("name"), "tool_choice.name", functions), not single
    if kind not in ("auto", "any", "none"):
        raise _wrong("tool_choice.type", "must be auto, any, tool or none")
    choice: Choice = "required" if kind == "any" else "none" if kind == "none" else "auto"
    _need_tools(choice, functions, "tool_choice.type")
    return choice, "", not single


def _plain_choice(value: Any, functions: Sequence[Mapping[str, Any]]) -> tuple[Choice, str]:
    choices: tuple[Choice, ...] = ("auto", "none", "required")
    for choice in choices:
        if value == choice or (value is None and choice == "auto"):
            _need_tools(choice, functions, "tool_choice")
            return choice, ""
    raise _wrong("tool_choice", 'must be "auto", "none", "required", or an object that names functions')


def _need_tools(choice: Choice, functions: Sequence[Mapping[str, Any]], where: str) -> None:
    if choice == "required" and not functions:
        raise _wrong(where, "a call is required, but there are no tools")


def _named(name: Any, where: str, functions: Sequence[Mapping[str, Any]]) -> tuple[Choice, str]:
    if not isinstance(name, str):
        raise _wrong(where, "must be a string")
    if not any(one["name"] == name for one in functions):
        raise _wrong(where, f"no tool is called {name[:64]!r}")
    return "required", name


def _below(where: str, *keys: str) -> str:
    return ".".join([where, *filter(None, keys)])


def _wrong(where: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {message}", param=where)
