"""The tools of requests, and answers as content, reasoning and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.conformance.streams import cut, told
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.toolkit.chat.tool_calls import ChatStream, Tools, skip_special_tokens
from pegboard.toolkit.chat.tool_schema import Choice
from pegboard.toolkit.parsing.call_stream import CallStream
from pegboard.toolkit.parsing.output_parser import (
    Content,
    OutputParser,
    OutputParserContext,
    ParserStream,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from pegboard.toolkit.parsing.text_stream import Reading, TextStream

CTX = OutputParserContext("", "", "")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str = "weather", **more: Any) -> dict[str, Any]:
    return {"name": name, "parameters": SCHEMA, **more}


def tools_of(*functions: dict[str, Any], choice: Choice = "auto", name: str = "", parallel: bool = True) -> Tools:
    return Tools(functions, choice, name, parallel)  # type: ignore[arg-type]


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
TOOLS = tools_of(function(), function("now"))
TEXT = '--Let me 😀 see.--Look:\n<<{"name": "weather", "arguments": {"city": "Rom\\u00e9"}}>> <<{"name": "now"}>>\nSo.'


def chat_stream(**more: Any) -> ChatStream:
    return ChatStream(**{"tools": TOOLS, "tool_parser": CALLS, "reasoning_parser": THOUGHTS, **more})


class TestTools:
    def test_templates_do_not_read_strict(self) -> None:
        tools = tools_of(function(description="It rains.", strict=True), function("now"))
        assert tools.active
        assert tools.for_template == [
            {"type": "function", "function": {"name": "weather", "description": "It rains.", "parameters": SCHEMA}},
            {"type": "function", "function": {"name": "now", "parameters": SCHEMA}},
        ]

    @pytest.mark.parametrize("choice", ["auto", "none", "required"])
    def test_choices(self, choice: Choice) -> None:
        tools = tools_of(function(), choice=choice)
        assert tools.active == (choice != "none")
        assert bool(tools.for_template) == tools.active

    def test_no_tools(self) -> None:
        for tools in (Tools(), Tools(choice="none")):
            assert not tools.active
            assert tools.for_template == []
            assert tools.grammar(CALLS) is None


class TestGrammars:
    def test_required_and_named(self) -> None:
        functions = (function(), function("now"))
        found = tools_of(*functions, choice="required").grammar(CALLS)
        assert found == Grammar("regex", "['weather', 'now']  True True")
        found = tools_of(*functions, choice="required", name="now").grammar(CALLS)
        assert found == Grammar("regex", "['weather', 'now'] now False True")
        found = tools_of(*functions, choice="required", parallel=False).grammar(CALLS)
        assert found == Grammar("regex", "['weather', 'now']  False True")

    def test_what_cannot_be_forced_is_refused(self) -> None:
        for parser in (None, THOUGHTS):
            with pytest.raises(InvalidRequest, match="cannot be forced") as error:
                tools_of(function(), choice="required").grammar(parser)
            assert (error.value.status, error.value.param) == (400, "tool_choice")

    def test_strict_functions(self) -> None:
        strict = tools_of(function(strict=True))
        assert strict.grammar(CALLS) == Grammar("regex", "['weather']  True False")
        assert strict.grammar(CALLS, features=["grammar.regex"]) is not None
        assert strict.grammar(CALLS, features=["grammar.ebnf"]) is None
        assert strict.grammar(None) is None
        assert strict.grammar(THOUGHTS) is None
        assert tools_of(function(strict=False)).grammar(CALLS) is None


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

    @pytest.mark.parametrize("tools", [None, Tools(), tools_of(function(), choice="none")])
    def test_without_tools_nothing_is_called(self, tools: Tools | None) -> None:
        answer = chat_stream(tools=tools).collect(TEXT)
        assert answer.content == TEXT.split("--")[2]
        assert answer.calls == ()

    def test_a_call_in_a_thought_is_none(self) -> None:
        answer = chat_stream().collect('--<<{"name": "now"}>>--Hm.')
        assert (answer.reasoning, answer.content, answer.calls) == ('<<{"name": "now"}>>', "Hm.", ())

    def test_one_call_where_they_may_not_be_parallel(self) -> None:
        tools = tools_of(function(), function("now"), parallel=False)
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
