"""The tools of requests, and answers as content, reasoning and calls."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.conformance.streams import cut, told
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.grammar import Grammar
from pegboard.core.interfaces.output_parser import (
    Content,
    OutputParser,
    OutputParserContext,
    ParserStream,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from pegboard.core.toolkit.chat.tool_calls import ChatStream, Tools, skip_special_tokens
from pegboard.core.toolkit.chat.tool_schema import MAX_TOOLS, check_schema
from pegboard.core.toolkit.parsing.call_stream import CallStream
from pegboard.core.toolkit.parsing.text_stream import Reading, TextStream

CTX = OutputParserContext("", "", "")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str = "weather", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **function}}


class Bracketed(CallStream):
    """Calls in angle brackets."""

    def run(self) -> Reading[None]:
        while (yield from self.content("<<")):
            yield from self.attempt(self.read_call())
            yield from self.content(">>")
            self.leave_out_marker()


class Calls(OutputParser):
    def stream(self, tools: Any = (), *, prompt: str = "") -> ParserStream:
        return Bracketed(tools)

    def constraint(self, tools: Any, *, name: str = "", parallel: bool = True, required: bool = True) -> Grammar | None:
        return Grammar("regex", f"{[one['name'] for one in tools]} {name} {parallel} {required}")


class Dashed(TextStream):
    """Thoughts between dashes."""

    def __init__(self, opened: bool) -> None:
        super().__init__()
        self.opened = opened

    def run(self) -> Reading[None]:
        if self.opened or (yield from self.source.read_marker("--")):
            yield from self.until(self.sink.reasoning, "--")


class Thoughts(OutputParser):
    skip_special_tokens = False

    def stream(self, tools: Any = (), *, prompt: str = "") -> ParserStream:
        return Dashed(prompt.endswith("--"))


CALLS, THOUGHTS = Calls(None, CTX), Thoughts(None, CTX)
TOOLS = Tools.of_chat([tool(), tool("now")])
TEXT = '--Let me 😀 see.--Look:\n<<{"name": "weather", "arguments": {"city": "Rom\\u00e9"}}>> <<{"name": "now"}>>\nSo.'


def chat_stream(**more: Any) -> ChatStream:
    return ChatStream(**{"tools": TOOLS, "tool_parser": CALLS, "reasoning_parser": THOUGHTS, **more})


class TestTools:
    def test_chat_completions(self) -> None:
        tools = Tools.of_chat([tool(description="It rains.", strict=True), tool("now", parameters=None)])
        assert tools == Tools(
            (
                {"name": "weather", "description": "It rains.", "parameters": SCHEMA, "strict": True},
                {"name": "now", "parameters": {"type": "object", "properties": {}}},
            )
        )
        assert tools.active
        functions = [one["function"] for one in tools.for_template]
        assert functions[0] == {"name": "weather", "description": "It rains.", "parameters": SCHEMA}

    def test_responses(self) -> None:
        flat = {"type": "function", "name": "weather", "parameters": SCHEMA}
        tools = Tools.of_responses([flat], {"type": "function", "name": "weather"}, False)
        assert tools == Tools(({"name": "weather", "parameters": SCHEMA},), "required", "weather", False)

    def test_messages(self) -> None:
        given = {"name": "weather", "description": "It rains.", "input_schema": SCHEMA}
        function = {"name": "weather", "description": "It rains.", "parameters": SCHEMA}
        assert Tools.of_anthropic([given]) == Tools((function,))
        single = {"type": "any", "disable_parallel_tool_use": True}
        assert Tools.of_anthropic([given], single) == Tools((function,), "required", "", False)
        named = {"type": "tool", "name": "weather"}
        assert Tools.of_anthropic([given], named) == Tools((function,), "required", "weather")
        assert Tools.of_anthropic([given], {"type": "none"}) == Tools((function,), "none")

    @pytest.mark.parametrize("choice", ["auto", "none", "required"])
    def test_choices(self, choice: str) -> None:
        tools = Tools.of_chat([tool()], choice)
        assert (tools.choice, tools.name, tools.active) == (choice, "", choice != "none")
        assert bool(tools.for_template) == tools.active

    def test_no_tools(self) -> None:
        for tools in (Tools(), Tools.of_chat(), Tools.of_chat([], "auto"), Tools.of_chat(None, "none")):
            assert not tools.active
            assert tools.grammar(CALLS) is None

    @pytest.mark.parametrize(
        ("tools", "param"),
        [
            ("x", "tools"),
            ({"type": "function"}, "tools"),
            ([5], "tools.0"),
            ([{}], "tools.0.function"),
            ([{"type": "function", "function": "f"}], "tools.0.function"),
            ([{"type": "web_search"}], "tools.0.type"),
            ([{"type": ["function"], "function": {"name": "f"}}], "tools.0.type"),
            ([tool(), tool("")], "tools.1.function.name"),
            ([tool("a b")], "tools.0.function.name"),
            ([tool("é")], "tools.0.function.name"),
            ([tool("x\n")], "tools.0.function.name"),
            ([tool("x" * 65)], "tools.0.function.name"),
            ([tool(5)], "tools.0.function.name"),  # type: ignore[arg-type]
            ([tool(), tool("now"), tool()], "tools.2.function.name"),
            ([tool(description=5)], "tools.0.function.description"),
            ([tool(strict="yes")], "tools.0.function.strict"),
            ([tool(parameters="{}")], "tools.0.function.parameters"),
            ([tool(parameters=[])], "tools.0.function.parameters"),
            ([tool(parameters={"type": "string"})], "tools.0.function.parameters.type"),
            ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], "tools"),
            ([tool(description="x" * 600_000)], "tools"),
            ([tool(description="\ud800")], "tools"),
            ([tool(parameters={"type": "object", "default": float("nan")})], "tools"),
        ],
    )
    def test_odd_tools(self, tools: Any, param: str) -> None:
        with pytest.raises(InvalidRequest) as error:
            Tools.of_chat(tools)
        assert (error.value.status, error.value.param) == (400, param)
        assert len(error.value.message) < 300

    @pytest.mark.parametrize(
        ("schema", "below"),
        [
            ({"properties": {"a": {"type": "strin"}}}, "properties.a.type"),
            ({"properties": {"a": {"type": []}}}, "properties.a.type"),
            ({"properties": {"a": {"type": {}}}}, "properties.a.type"),
            ({"properties": {"a": {"type": [["string"]]}}}, "properties.a.type"),
            ({"properties": {"a": 5}}, "properties.a"),
            ({"properties": [1]}, "properties"),
            ({"properties": {"a": {"pattern": 7}}}, "properties.a.pattern"),
            ({"properties": {"a": {"enum": []}}}, "properties.a.enum"),
            ({"required": "a"}, "required"),
            ({"required": [1]}, "required"),
            ({"$ref": 1}, "$ref"),
            ({"anyOf": []}, "anyOf"),
            ({"anyOf": [{}, "x"]}, "anyOf.1"),
            ({"$defs": {"x": {"items": "y"}}}, "$defs.x.items"),
            ({"properties": {"a": {"items": [{}, 1]}}}, "properties.a.items.1"),
            ({"properties": {"a": {"minLength": -1}}}, "properties.a.minLength"),
            ({"properties": {"a": {"maxItems": "2"}}}, "properties.a.maxItems"),
            ({"properties": {"a": {"maxItems": float("inf")}}}, "properties.a.maxItems"),
            ({"properties": {"a": {"minimum": "2"}}}, "properties.a.minimum"),
            ({"additionalProperties": "no"}, "additionalProperties"),
        ],
    )
    def test_cve_2025_48944_odd_schemas(self, schema: dict[str, Any], below: str) -> None:
        """CVE-2025-48944: a tool schema with an odd `type` or `pattern` ended the server."""
        with pytest.raises(InvalidRequest) as error:
            Tools.of_chat([tool(parameters={"type": "object", **schema})])
        assert (error.value.status, error.value.param) == (400, f"tools.0.function.parameters.{below}")
        for make, path in ((Tools.of_responses, "parameters"), (Tools.of_anthropic, "input_schema")):
            with pytest.raises(InvalidRequest) as error:
                make([{"name": "f", path: {"type": "object", **schema}}])
            assert error.value.param == f"tools.0.{path}.{below}"

    def test_deep_schemas(self) -> None:
        schema: dict[str, Any] = {}
        for _ in range(5000):
            schema = {"items": schema}
        with pytest.raises(InvalidRequest, match="levels deep"):
            Tools.of_chat([tool(parameters={"type": "object", "properties": {"a": schema}})])
        value: Any = 1
        for _ in range(100_000):
            value = [value]
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            Tools.of_chat([tool(parameters={"type": "object", "default": value})])

    @pytest.mark.parametrize(
        "schema",
        [
            {},
            True,
            {"type": ["string", "null"], "minLength": 0, "maxLength": 3.0},
            {"items": [{}, True], "prefixItems": []},
            {"exclusiveMinimum": True, "minimum": -1.5},
            {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"enum": [None, 1, "x"]}}, "x-own": object()},
            {"properties": {"type": {"type": "string"}, "properties": {}, "required": {}}},
        ],
    )
    def test_sound_schemas(self, schema: Any) -> None:
        check_schema(schema, "here")

    @properties()
    @given(
        schema=st.recursive(
            st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["string", "object", "x", ""]),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["type", "properties", "items", "anyOf", "enum", "required", "pattern", "$defs", "a"]
                    ),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=12,
        )
    )
    def test_whatever_is_sent_is_taken_or_refused(self, schema: Any) -> None:
        tools = [{"name": "f", "parameters": schema, "input_schema": schema, "function": schema}]
        for make in (Tools.of_responses, Tools.of_chat, Tools.of_anthropic):
            with contextlib.suppress(InvalidRequest):
                json.dumps(make(tools, schema).for_template)

    @pytest.mark.parametrize(
        ("choice", "param"),
        [
            ("any", "tool_choice"),
            (5, "tool_choice"),
            ([], "tool_choice"),
            ({}, "tool_choice"),
            ({"type": "function"}, "tool_choice.function"),
            ({"type": "function", "function": {}}, "tool_choice.function.name"),
            ({"type": "function", "function": {"name": "sun"}}, "tool_choice.function.name"),
        ],
    )
    def test_odd_choices(self, choice: Any, param: str) -> None:
        with pytest.raises(InvalidRequest) as error:
            Tools.of_chat([tool()], choice)
        assert (error.value.status, error.value.param) == (400, param)

    def test_a_call_of_nothing_cannot_be_required(self) -> None:
        for make, choice in ((Tools.of_chat, "required"), (Tools.of_anthropic, {"type": "any"})):
            with pytest.raises(InvalidRequest, match="there are no tools"):
                make([], choice)
        with pytest.raises(InvalidRequest, match="no tool is called"):
            Tools.of_responses([], {"type": "function", "name": "f"})
        for odd in ("auto", {"type": "all"}, {"type": "auto", "disable_parallel_tool_use": 1}):
            with pytest.raises(InvalidRequest) as error:
                Tools.of_anthropic([], odd)
            assert (error.value.param or "").startswith("tool_choice")


class TestGrammars:
    def test_required_and_named(self) -> None:
        functions = [tool(), tool("now")]
        found = Tools.of_chat(functions, "required").grammar(CALLS)
        assert found == Grammar("regex", "['weather', 'now']  True True")
        named = {"type": "function", "function": {"name": "now"}}
        found = Tools.of_chat(functions, named).grammar(CALLS)
        assert found == Grammar("regex", "['weather', 'now'] now False True")
        found = Tools.of_chat(functions, "required", False).grammar(CALLS)
        assert found == Grammar("regex", "['weather', 'now']  False True")

    def test_what_cannot_be_forced_is_refused(self) -> None:
        for parser in (None, THOUGHTS):
            with pytest.raises(InvalidRequest, match="cannot be forced") as error:
                Tools.of_chat([tool()], "required").grammar(parser)
            assert (error.value.status, error.value.param) == (400, "tool_choice")

    def test_strict_functions(self) -> None:
        strict = Tools.of_chat([tool(strict=True)])
        assert strict.grammar(CALLS) == Grammar("regex", "['weather']  True False")
        assert strict.grammar(CALLS, features=["grammar.regex"]) is not None
        assert strict.grammar(CALLS, features=["grammar.ebnf"]) is None
        assert strict.grammar(None) is None
        assert strict.grammar(THOUGHTS) is None
        assert Tools.of_chat([tool(strict=False)]).grammar(CALLS) is None


class TestChatStream:
    @properties()
    @given(data=st.data())
    def test_an_answer(self, data: st.DataObject) -> None:
        stream = chat_stream()
        events = [one for piece in data.draw(cut(TEXT)) for one in stream.feed(piece)] + stream.finish()
        found = told(events)
        assert found.loaded == [("weather", {"city": "Romé"}), ("now", {})]
        assert (found.reasoning, found.content) == ("Let me 😀 see.", "Look:\nSo.")
        answer = stream.answer()
        assert (answer.content, answer.reasoning) == (found.content, found.reasoning)
        assert [(one.name, one.arguments) for one in answer.calls] == list(found.calls)
        assert len({one.id for one in answer.calls}) == 2
        assert all(one.id.startswith("call_") and len(one.id) == 29 for one in answer.calls)

    def test_all_at_once(self) -> None:
        answer = chat_stream().collect(TEXT)
        assert answer.content == "Look:\nSo."
        assert [json.loads(one.arguments) for one in answer.calls] == [{"city": "Romé"}, {}]

    def test_ids_are_there_with_the_start(self) -> None:
        stream = chat_stream()
        events = stream.feed(TEXT[: TEXT.index("Rom")])
        start = next(one for one in events if isinstance(one, ToolCallStart))
        assert stream.calls[start.index].name == "weather"
        assert stream.calls[0].id == chat_id(stream)

    def test_a_part_without_a_parser_is_content(self) -> None:
        assert chat_stream(reasoning_parser=None).collect(TEXT).content.startswith("--Let me")
        assert chat_stream(tool_parser=None).collect(TEXT).content == TEXT.split("--")[2]
        assert ChatStream().collect(TEXT).content == TEXT

    @pytest.mark.parametrize("tools", [None, Tools(), Tools.of_chat([tool()], "none")])
    def test_without_tools_nothing_is_called(self, tools: Tools | None) -> None:
        answer = chat_stream(tools=tools).collect(TEXT)
        assert answer.content == TEXT.split("--")[2]
        assert answer.calls == ()

    def test_a_call_in_a_thought_is_none(self) -> None:
        answer = chat_stream().collect('--<<{"name": "now"}>>--Hm.')
        assert (answer.reasoning, answer.content, answer.calls) == ('<<{"name": "now"}>>', "Hm.", ())

    def test_one_call_where_they_may_not_be_parallel(self) -> None:
        tools = Tools.of_chat([tool(), tool("now")], None, False)
        stream = chat_stream(tools=tools)
        events = [one for char in TEXT for one in stream.feed(char)] + stream.finish()
        assert [name for name, _ in told(events).calls] == ["weather"]
        assert [one.name for one in stream.answer().calls] == ["weather"]
        assert stream.answer().content == "Look:\nSo."

    def test_thinking_in_one_piece(self) -> None:
        stream = chat_stream(stream_reasoning=False)
        events = [one for char in TEXT for one in stream.feed(char)] + stream.finish()
        assert [one for one in events if isinstance(one, Reasoning)] == [Reasoning("Let me 😀 see.")]
        assert events[0] == Reasoning("Let me 😀 see.")
        # Also where nothing follows it.
        stream = chat_stream(stream_reasoning=False)
        assert stream.feed("--Let me") == []
        assert stream.finish() == [Reasoning("Let me")]
        assert stream.answer().reasoning == "Let me"

    def test_the_prompt_may_have_opened_a_thought(self) -> None:
        assert chat_stream(prompt="Hi --").collect("Hm--Hi").reasoning == "Hm"
        assert chat_stream(prompt="Hi --", constrained=True).collect("Hm--Hi").content == "Hm--Hi"

    def test_what_the_answer_goes_on_from(self) -> None:
        assert chat_stream(prompt="Hi: --I think", prefill="--I think").collect(" so--Hi").reasoning == " so"
        assert chat_stream(prompt="Hi: --I think--So", prefill="--I think--So").collect("--Hi--").content == "--Hi--"

    def test_what_the_answer_goes_on_from_may_be_trimmed(self) -> None:
        assert chat_stream(prompt="Hi: --I think", prefill="--I think \n").collect("so--Hi").reasoning == "so"

    def test_special_tokens_stay_where_a_parser_needs_them(self) -> None:
        assert skip_special_tokens(TOOLS, CALLS, None)
        assert skip_special_tokens(None, None, None)
        assert not skip_special_tokens(TOOLS, CALLS, THOUGHTS)
        assert not skip_special_tokens(TOOLS, THOUGHTS, None)
        assert skip_special_tokens(Tools(), THOUGHTS, None)

    def test_events_of_a_plain_answer(self) -> None:
        stream = ChatStream()
        assert stream.feed("") == []
        assert stream.feed("Hi") == [Content("Hi")]
        assert stream.finish() == []

    def test_a_broken_call_ends_where_the_text_does(self) -> None:
        stream = chat_stream(reasoning_parser=None)
        events = [*stream.feed('<<{"name": "weather", "arguments": {"city": oops'), *stream.finish()]
        assert events[:1] == [ToolCallStart(0, "weather")]
        assert "".join(one.text for one in events[1:] if isinstance(one, ToolCallArguments)) == '{"city": oops'


def chat_id(stream: ChatStream) -> str:
    return stream.answer().calls[0].id
