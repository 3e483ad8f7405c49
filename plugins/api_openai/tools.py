"""Tools and the choice among them, as OpenAI's chat completions and responses spell them."""

from __future__ import annotations

from collections.abc import Mapping

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.tool_calls import Tools
from pegboard.toolkit.chat.tool_schema import (
    MAX_TOOLS,
    Choice,
    FunctionSource,
    check_choice,
    checked_functions,
    named_choice,
    wrong,
)
from pegboard.toolkit.parsing.output_parser import ToolFunction

Functions = tuple[ToolFunction, ...]
_CHOICES: tuple[Choice, ...] = ("auto", "none", "required")


def chat_tools(tools: object = None, tool_choice: object = None, parallel_tool_calls: bool | None = None) -> Tools:
    """Return the tools of a chat completion, whose functions stand below `function`. Raises InvalidRequest with the
    path of what is wrong.
    """
    functions = checked_functions(tools, _wrapped)
    functions, tool_choice = _allowed(tool_choice, functions, "function")
    return Tools(functions, *_choice(tool_choice, functions, "function"), parallel_tool_calls is not False)


def response_tools(tools: object = None, tool_choice: object = None, parallel_tool_calls: bool | None = None) -> Tools:
    """Return the tools of a response, each of which is its function. Raises InvalidRequest with the path of what is
    wrong.
    """
    functions = checked_functions(tools, _flat)
    functions, tool_choice = _allowed(tool_choice, functions, "")
    return Tools(functions, *_choice(tool_choice, functions, ""), parallel_tool_calls is not False)


def _wrapped(where: str, tool: Mapping[str, object]) -> FunctionSource:
    _check_type(where, tool)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise wrong(f"{where}.function", "must be an object")
    return FunctionSource(f"{where}.function", function)


def _flat(where: str, tool: Mapping[str, object]) -> FunctionSource:
    _check_type(where, tool)
    return FunctionSource(where, tool)


def _check_type(where: str, tool: Mapping[str, object]) -> None:
    kind = tool.get("type")
    if kind not in ("function", None):
        raise _unsupported(where, kind)


def _unsupported(where: str, kind: object) -> InvalidRequest:
    return wrong(f"{where}.type", f"{str(kind)[:64]!r} is not supported, function is")


def _choice(value: object, functions: Functions, wrapper: str) -> tuple[Choice, str]:
    """Return the choice, and the function that it names or "". The name stands below `function`, or beside the type;
    `wrapper` is as of `_allowed`, and says which of them is missing where both are.
    """
    if isinstance(value, Mapping) and value.get("type") == "function":
        function = value.get("function")
        if function is None and (not wrapper or "name" in value):
            return named_choice(value.get("name"), "tool_choice.name", functions)
        if not isinstance(function, Mapping):
            raise wrong("tool_choice.function", "must be an object")
        return named_choice(function.get("name"), "tool_choice.function.name", functions)
    if value == "any":
        value = "required"  # Mistral's word
    for choice in _CHOICES:
        if value == choice or (value is None and choice == "auto"):
            check_choice(choice, "tool_choice", functions)
            return choice, ""
    raise wrong("tool_choice", 'must be "auto", "none", "required", or an object that names functions')


def _allowed(value: object, functions: Functions, wrapper: str) -> tuple[Functions, object]:
    """Return the functions that a `tool_choice` leaves, and the choice among them: ``allowed_tools`` names those that
    may be called, with `auto` or `required` for a mode; any other choice leaves all. `wrapper` is the key that chats
    have a function under, beside a list that is wrapped too; "" for responses.
    """
    if not isinstance(value, Mapping) or value.get("type") != "allowed_tools":
        return functions, value
    where = "tool_choice.allowed_tools" if wrapper else "tool_choice"
    source: object = value.get("allowed_tools") if wrapper else value
    if not isinstance(source, Mapping):
        raise wrong(where, "must be an object")
    if source.get("mode") not in ("auto", "required"):
        raise wrong(f"{where}.mode", 'must be "auto" or "required"')
    tools = source.get("tools")
    if not isinstance(tools, list):
        raise wrong(f"{where}.tools", "must be a list")
    if len(tools) > MAX_TOOLS:
        raise wrong(f"{where}.tools", f"may have at most {MAX_TOOLS} entries, got {len(tools)}")
    names = {_allowed_name(f"{where}.tools.{i}", tool, wrapper, functions) for i, tool in enumerate(tools)}
    left = tuple(one for one in functions if one["name"] in names)
    check_choice(source["mode"], f"{where}.tools", left)
    return left, source["mode"]


def _allowed_name(where: str, tool: object, wrapper: str, functions: Functions) -> str:
    if not isinstance(tool, Mapping):
        raise wrong(where, "must be an object")
    if tool.get("type") != "function":
        raise _unsupported(where, tool.get("type"))
    function: object = tool.get(wrapper) if wrapper else tool
    path = f"{where}.{wrapper}" if wrapper else where
    if not isinstance(function, Mapping):
        raise wrong(path, "must be an object")
    _, name = named_choice(function.get("name"), f"{path}.name", functions)
    return name
