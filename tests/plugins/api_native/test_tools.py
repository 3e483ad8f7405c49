"""Tools whose calls are looked for in a text."""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_native.tools import called_tools
from pegboard.toolkit.chat.tool_calls import Tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_tools() -> None:
    function = {"name": "weather", "parameters": SCHEMA}
    assert called_tools([{"type": "function", "function": function}, {"function": {"name": "now"}}]) == Tools(
        (function, {"name": "now", "parameters": {"type": "object", "properties": {}}})  # type: ignore[arg-type]
    )
    assert called_tools([]) == Tools()


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([5], "tools.0"),
        ([{}], "tools.0.function"),
        ([{"type": "custom", "function": {"name": "f"}}], "tools.0.type"),
        ([{"function": {"name": "f"}}, {"function": {"name": "f"}}], "tools.1.function.name"),
        ([{"function": {"name": "f", "parameters": {"$ref": 1}}}], "tools.0.function.parameters.$ref"),
    ],
)
def test_odd_tools(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        called_tools(tools)
    assert (error.value.status, error.value.param) == (400, param)
