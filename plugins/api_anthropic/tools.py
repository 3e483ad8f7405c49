"""Tools and the choice among them, as Anthropic's messages spell them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.tool_calls import Tools
from pegboard.toolkit.chat.tool_schema import (
    Choice,
    FunctionSource,
    ToolLimits,
    check_choice,
    checked_functions,
    named_choice,
    wrong,
)
from pegboard.toolkit.parsing.output_parser import ToolFunction

LIMITS = ToolLimits(tools=1024, name=128)
"""Anthropic's own for names, and room for the tools of many MCP servers."""

_CHOICES: dict[str, Choice] = {"auto": "auto", "any": "required", "none": "none"}


def message_tools(tools: Sequence[object] | None = None, tool_choice: object = None) -> Tools:
    """Return the tools of a message: the client's, with their schemas in `input_schema`, and the choices auto, any,
    tool and none. Raises InvalidRequest with the path of what is wrong, and for tools that this server would have to
    run itself.
    """
    _refuse_server_tools(tools or ())
    functions = checked_functions(tools, _flat, LIMITS)
    choice, name, parallel = _choice(tool_choice, functions)
    return Tools(functions, choice, name, parallel)


def _refuse_server_tools(tools: Sequence[object]) -> None:
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            raise InvalidRequest(
                f"tools.{i}.type: this server runs no tools of its own, so it has no {str(kind)[:64]!r}; "
                "custom tools are the client's",
                param=f"tools.{i}.type",
                code="unsupported",
            )


def _flat(where: str, tool: Mapping[str, object]) -> FunctionSource:
    return FunctionSource(where, tool, "input_schema")


def _choice(value: object, functions: Sequence[ToolFunction]) -> tuple[Choice, str, bool]:
    """Return the choice, the function that it names or "", and whether calls may be parallel."""
    if value is None:
        return "auto", "", True
    if not isinstance(value, Mapping):
        raise wrong("tool_choice", "must be an object")
    single = value.get("disable_parallel_tool_use", False)
    if not isinstance(single, bool):
        raise wrong("tool_choice.disable_parallel_tool_use", "must be true or false")
    kind = value.get("type")
    if kind == "tool":
        return *named_choice(value.get("name"), "tool_choice.name", functions), not single
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise wrong("tool_choice.type", "must be auto, any, tool or none")
    choice = _CHOICES[kind]
    check_choice(choice, "tool_choice.type", functions)
    return choice, "", not single
