"""Tools and the choice among them, in Anthropic's form."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_anthropic.tools import LIMITS, message_tools
from pegboard.toolkit.chat.tool_calls import Tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_messages() -> None:
    given = {"name": "weather", "description": "It rains.", "input_schema": SCHEMA}
    function = {"name": "weather", "description": "It rains.", "parameters": SCHEMA}
    assert message_tools() == message_tools([]) == Tools()
    assert message_tools([given]) == Tools((function,))  # type: ignore[arg-type]
    assert message_tools([{**given, "type": "custom"}]) == Tools((function,))  # type: ignore[arg-type]
    single = {"type": "any", "disable_parallel_tool_use": True}
    assert message_tools([given], single) == Tools((function,), "required", "", False)  # type: ignore[arg-type]
    named = {"type": "tool", "name": "weather"}
    assert message_tools([given], named) == Tools((function,), "required", "weather")  # type: ignore[arg-type]
    assert message_tools([given], {"type": "none"}) == Tools((function,), "none")  # type: ignore[arg-type]


def test_names_and_numbers_are_as_anthropic_has_them() -> None:
    names = ["mcp__" + "x" * 123, *(f"f{i}" for i in range(LIMITS.tools - 1))]
    assert [one["name"] for one in message_tools([{"name": name} for name in names]).functions] == names


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"name": "x" * 129}], "tools.0.name"),
        ([{"name": f"f{i}"} for i in range(LIMITS.tools + 1)], "tools"),
        ([5], "tools.0"),
        ([{}], "tools.0.name"),
        ([{"name": "f"}, {"name": "f"}], "tools.1.name"),
        ([{"name": "f"}, {"name": "g", "type": "web_search"}], "tools.1.type"),
        ([{"name": "f", "input_schema": {"type": "string"}}], "tools.0.input_schema.type"),
        ([{"name": "f", "input_schema": {"type": "object", "$ref": 1}}], "tools.0.input_schema.$ref"),
    ],
)
def test_odd_tools(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        message_tools(tools)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("auto", "tool_choice"),
        ({"type": "all"}, "tool_choice.type"),
        ({"type": ["any"]}, "tool_choice.type"),
        ({"type": "tool", "name": "sun"}, "tool_choice.name"),
        ({"type": "auto", "disable_parallel_tool_use": 1}, "tool_choice.disable_parallel_tool_use"),
    ],
)
def test_odd_choices(choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        message_tools([{"name": "f"}], choice)
    assert (error.value.status, error.value.param) == (400, param)


def test_a_call_of_nothing_cannot_be_required() -> None:
    with pytest.raises(InvalidRequest, match="there are no tools"):
        message_tools([], {"type": "any"})


@properties()
@given(
    schema=st.recursive(
        st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["string", "object", "x", ""]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "properties", "items", "anyOf", "enum", "required", "pattern", "$defs", "a"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_each_body_is_taken_or_refused(schema: Any) -> None:
    with contextlib.suppress(InvalidRequest):
        json.dumps(message_tools([{"name": "f", "input_schema": schema}], schema).for_template)
