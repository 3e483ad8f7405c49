"""Calls in a thought: meant where the thought was not ended, and else thought about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.conformance.streams import Told, told
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.chat.tool_calls import ChatStream, Tools
from pegboard.toolkit.parsing.output_parser import OutputParser, OutputParserContext, ToolFunction

TOOLS: tuple[ToolFunction, ...] = (
    {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "now"},
)
MARKED = ["hermes", "qwen3_coder", "glm", "minimax_m2", "deepseek_v32", "deepseek_v3", "kimi_k2", "mistral", "granite",
          "hunyuan", "olmo3"]  # fmt: skip


def made(contract: str, name: str) -> OutputParser:
    record = Registry.discover().get(contract, name)
    assert record is not None
    parser: OutputParser = record.load()(record.options_model()(), OutputParserContext("", "", ""))
    return parser


def read(parser: OutputParser, text: str, prompt: str = "", tools: Sequence[ToolFunction] = TOOLS) -> Told:
    """What is told of an answer, which is the same at every cut, and a character at a time."""
    thinking = made("reasoning_parser", "qwen3")

    def of(*pieces: str) -> Told:
        stream = ChatStream(tools=Tools(tuple(tools)), tool_parser=parser, reasoning_parser=thinking, prompt=prompt)
        return told([event for piece in pieces for event in stream.feed(piece)] + stream.finish())

    whole = of(text)
    assert of(*text) == whole
    for at in range(1, len(text)):
        assert of(text[:at], text[at:]) == whole, f"cut after {text[:at]!r}"
    return whole


def written(parser: OutputParser, *calls: tuple[str, Any]) -> str:
    return parser.write_calls([{"name": name, "arguments": arguments} for name, arguments in calls])


ROME: tuple[str, Any] = ("weather", {"city": "Rome </t <think> x"})
NOW: tuple[str, Any] = ("now", {})


@pytest.mark.parametrize("name", MARKED)
class TestEveryFormat:
    def test_a_call_in_a_thought_without_an_end_is_one(self, name: str) -> None:
        parser = made("tool_parser", name)
        for begin, prompt in (("<think>\n", ""), ("", "<think>\n")):
            found = read(parser, f"{begin}I need it.\n{written(parser, ROME, NOW)}\n", prompt)
            assert (found.reasoning, found.content, found.loaded) == ("I need it.", "", [ROME, NOW])

    def test_a_call_in_a_thought_with_an_answer_after_it_is_none(self, name: str) -> None:
        parser = made("tool_parser", name)
        thought = f"I could call\n{written(parser, ROME)}"
        found = read(parser, f"<think>{thought}\n</think>\n\nFour.")
        assert (found.reasoning, found.content, found.calls) == (thought, "Four.", ())
        found = read(parser, f"<think>{thought}\n</think>\n\n{written(parser, NOW)}")
        assert (found.reasoning, found.content, found.loaded) == (thought, "", [NOW])

    def test_a_call_that_the_thought_goes_on_after_is_none(self, name: str) -> None:
        parser = made("tool_parser", name)
        thought = f"I could call {written(parser, ROME)}. Or not."
        found = read(parser, f"<think>{thought}")
        assert (found.reasoning, found.content, found.calls) == (thought, "", ())

    def test_the_last_call_counts(self, name: str) -> None:
        parser = made("tool_parser", name)
        thought = f"I could call {written(parser, ROME)}. Or rather:"
        found = read(parser, f"<think>{thought}\n\n{written(parser, NOW)}")
        assert (found.reasoning, found.content, found.loaded) == (thought, "", [NOW])

    def test_markers_without_calls_are_thought(self, name: str) -> None:
        parser = made("tool_parser", name)
        for marker in parser.call_markers:
            for thought in (f"Say {marker}", f"Say {marker} and {marker[:-1]}", f"{marker}{marker}\n"):
                found = read(parser, f"<think>{thought}")
                assert (found.reasoning, found.content, found.calls) == (thought, "", ())


def test_a_call_that_was_cut_is_one_as_far_as_it_goes() -> None:
    found = read(made("tool_parser", "hermes"), '<think>Hm.\n<tool_call>{"name": "weather", "arguments": {"city": "Ro')
    assert (found.reasoning, found.calls) == ("Hm.", (("weather", '{"city": "Ro'),))


def test_what_nobody_offered_is_not_called() -> None:
    thought = '<tool_call>\n{"name": "nope", "arguments": {}}\n</tool_call>'
    found = read(made("tool_parser", "hermes"), f"<think>{thought}")
    assert (found.reasoning, found.content, found.calls) == (thought, "", ())


def test_thinking_is_told_as_it_comes() -> None:
    stream = ChatStream(
        tools=Tools(TOOLS),
        tool_parser=made("tool_parser", "hermes"),
        reasoning_parser=made("reasoning_parser", "qwen3"),
        prompt="<think>",
    )
    first = told([event for char in "Many <words>, and <tool_call> then " * 20 for event in stream.feed(char)])
    assert len(first.reasoning) > 600
    assert json.dumps(first.calls) == "[]"
