"""Tools as `/parse_function_call` has them: each with its function below `function`."""

from __future__ import annotations

from collections.abc import Mapping

from pegboard.toolkit.chat.tool_calls import Tools
from pegboard.toolkit.chat.tool_schema import FunctionSource, checked_functions, wrong


def called_tools(tools: object) -> Tools:
    """Return the tools whose calls a text may hold. Raises InvalidRequest with the path of what is wrong."""
    return Tools(checked_functions(tools, _wrapped))


def _wrapped(where: str, tool: Mapping[str, object]) -> FunctionSource:
    kind, function = tool.get("type"), tool.get("function")
    if kind not in ("function", None):
        raise wrong(f"{where}.type", f"{str(kind)[:64]!r} is not supported, function is")
    if not isinstance(function, Mapping):
        raise wrong(f"{where}.function", "must be an object")
    return FunctionSource(f"{where}.function", function)
