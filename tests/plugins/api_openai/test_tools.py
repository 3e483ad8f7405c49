"""Tools and the choice among them, in OpenAI's two forms."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.tools import chat_tools, response_tools
from pegboard.toolkit.chat.tool_calls import Tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **function}}


def test_chat_completions() -> None:
    tools = chat_tools([tool(description="It rains.", strict=True), tool("now", parameters=None)])
    assert tools == Tools(
        (
            {"name": "weather", "description": "It rains.", "parameters": SCHEMA, "strict": True},  # type: ignore[typeddict-item]
            {"name": "now", "parameters": {"type": "object", "properties": {}}},
        )
    )
    assert tools.active
    functions = [one["function"] for one in tools.for_template]
    assert functions[0] == {"name": "weather", "description": "It rains.", "parameters": SCHEMA}


def test_responses() -> None:
    flat = {"type": "function", "name": "weather", "parameters": SCHEMA}
    tools = response_tools([flat], {"type": "function", "name": "weather"}, False)
    assert tools == Tools(({"name": "weather", "parameters": SCHEMA},), "required", "weather", False)  # type: ignore[typeddict-item]


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_choices(choice: str) -> None:
    tools = chat_tools([tool()], choice)
    assert (tools.choice, tools.name, tools.active) == (choice, "", choice != "none")
    assert response_tools([{"name": "weather"}], choice).choice == choice


def test_a_named_choice() -> None:
    tools = chat_tools([tool(), tool("now")], {"type": "function", "function": {"name": "now"}})
    assert (tools.choice, tools.name, tools.parallel) == ("required", "now", True)


@pytest.mark.parametrize(("said", "parallel"), [(None, True), (True, True), (False, False)])
def test_parallel_calls(said: bool | None, parallel: bool) -> None:
    assert chat_tools([tool()], None, said).parallel == parallel
    assert response_tools([{"name": "weather"}], None, said).parallel == parallel


def test_no_tools() -> None:
    for tools in (chat_tools(), chat_tools([], "auto"), chat_tools(None, "none"), response_tools()):
        assert not tools.active


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("x", "tools"),
        ({"type": "function"}, "tools"),
        ([5], "tools.0"),
        ([{}], "tools.0.function"),
        ([{"type": "function", "function": "f"}], "tools.0.function"),
        ([{"type": "web_search"}], "tools.0.type"),
        ([{"type": "custom"}], "tools.0.type"),
        ([{"type": ["function"], "function": {"name": "f"}}], "tools.0.type"),
        ([tool(), tool("")], "tools.1.function.name"),
        ([tool(), tool("now"), tool()], "tools.2.function.name"),
        ([tool(description=5)], "tools.0.function.description"),
        ([tool(strict="yes")], "tools.0.function.strict"),
        ([tool(parameters=[])], "tools.0.function.parameters"),
        ([tool(parameters={"type": "string"})], "tools.0.function.parameters.type"),
        ([tool(parameters={"properties": {"a": {"type": []}}})], "tools.0.function.parameters.properties.a.type"),
    ],
)
def test_odd_tools_of_chats(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        chat_tools(tools)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([5], "tools.0"),
        ([{}], "tools.0.name"),
        ([{"type": "web_search"}], "tools.0.type"),
        ([{"name": "f"}, {"name": "f"}], "tools.1.name"),
        ([{"name": "f", "parameters": {"type": "object", "anyOf": [{}, "x"]}}], "tools.0.parameters.anyOf.1"),
    ],
)
def test_odd_tools_of_responses(tools: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        response_tools(tools)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("all", "tool_choice"),
        (5, "tool_choice"),
        ([], "tool_choice"),
        ({}, "tool_choice"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "function": {}}, "tool_choice.function.name"),
        ({"type": "function", "function": {"name": "sun"}}, "tool_choice.function.name"),
    ],
)
def test_odd_choices(choice: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        chat_tools([tool()], choice)
    assert (error.value.status, error.value.param) == (400, param)


def test_a_call_of_nothing_cannot_be_required() -> None:
    with pytest.raises(InvalidRequest, match="there are no tools"):
        chat_tools([], "required")
    with pytest.raises(InvalidRequest, match="no tool is called"):
        response_tools([], {"type": "function", "name": "f"})


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
    tools = [{"name": "f", "parameters": schema, "function": schema}]
    for read in (chat_tools, response_tools):
        with contextlib.suppress(InvalidRequest):
            json.dumps(read(tools, schema).for_template)
