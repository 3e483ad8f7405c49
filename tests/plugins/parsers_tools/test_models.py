"""Whole answers of today's models, thinking and calls, as their published formats describe them; at every cut."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from pegboard.conformance.streams import Told, one_by_one, told
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.chat.tool_calls import ChatStream, Tools
from pegboard.toolkit.parsing.output_parser import OutputParser, OutputParserContext
from tests.plugins.parsers_tools.corpus import NOW, OSLO, ROME, TOOLS

REGISTRY = Registry.discover()


@dataclass(frozen=True)
class Answer:
    """What a model writes, and what it stands for."""

    parsers: tuple[str, str]
    """Of reasoning and of calls."""
    text: str
    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    prompt: str = ""

    def __str__(self) -> str:
        return f"{self.parsers[1]}: {self.text[:50]!r}"


def _message(channel: str, text: str, end: str = "<|end|><|start|>assistant") -> str:
    return f"<|channel|>{channel}<|message|>{text}{end}"


_GPT = ("harmony", "harmony")
_TO_ROME = _message("commentary to=functions.weather <|constrain|>json", '{"city": "Rome"}', "<|call|>")
_TO_OSLO = _message("commentary to=functions.weather json", '{"city": "Oslo", "days": 2}', "<|call|>")
_ANALYSIS = _message("analysis", "2 + 2.")
HARMONY = (
    Answer(_GPT, _ANALYSIS + _message("final", "Four.", "<|return|>"), "2 + 2.", "Four."),
    Answer(_GPT, _ANALYSIS + _message("final", "Four.", ""), "2 + 2.", "Four."),
    Answer(_GPT, _ANALYSIS + _TO_ROME, "2 + 2.", "", (ROME,)),
    Answer(_GPT, _ANALYSIS + _TO_OSLO.removesuffix("<|call|>"), "2 + 2.", "", (OSLO,)),
    Answer(
        _GPT,
        f"{_ANALYSIS}{_message('commentary', 'I will look.')}{_TO_ROME}<|start|>assistant{_ANALYSIS}{_TO_OSLO}",
        "2 + 2.\n2 + 2.",
        "I will look.",
        (ROME, OSLO),
    ),
    Answer(_GPT, _message("commentary", "One.") + _message("final", "Two.", "<|return|>"), "", "One.\nTwo."),
    # The recipient may stand with the role, whose beginning the prompt has.
    Answer(_GPT, ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>', calls=(ROME,)),
    Answer(
        _GPT,
        f"{_ANALYSIS} to=functions.now<|channel|>commentary <|constrain|>json<|message|>{{}}<|call|>",
        "2 + 2.",
        calls=(NOW,),
    ),
    # Models call in analysis, too, and leave arguments out.
    Answer(_GPT, _message("analysis to=functions.now code", "", "<|call|>"), calls=(NOW,)),
    Answer(
        _GPT,
        _message("commentary to=functions.note json", '{"text": "<|call|> <|end|>\\n<|start|>"}', "<|call|>"),
        calls=(("note", {"text": "<|call|> <|end|>\n<|start|>"}),),
    ),
    # What nobody offered is not called.
    Answer(
        _GPT,
        _ANALYSIS + _message("commentary to=functions.nope json", "{}", "<|call|>"),
        "2 + 2.",
        "<|start|>assistant" + _message("commentary to=functions.nope json", "{}", "<|call|>"),
    ),
    # Thinking about calls is thinking.
    Answer(
        _GPT,
        _message("analysis", "Call to=functions.now with {}?") + _message("final", "No.", "<|return|>"),
        "Call to=functions.now with {}?",
        "No.",
    ),
    # Ends that were forgotten, and headers that were cut.
    Answer(_GPT, f"{_message('analysis', 'Hm.', '')}<|start|>assistant{_message('final', 'So.', '')}", "Hm.", "So."),
    Answer(_GPT, f"{_ANALYSIS}<|channel|>fin", "2 + 2."),
    Answer(_GPT, "2 + 2.<|end|><|start|>assistant" + _message("final", "4.", ""), "2 + 2.", "4.", (), _ANALYSIS[:30]),
    Answer(_GPT, '{"a": "<|end|>"}', "", '{"a": "<|end|>"}'),
)

ANSWERS = (*HARMONY,)


def parser_of(contract: str, name: str) -> OutputParser:
    record = REGISTRY.get(contract, name)
    assert record is not None
    options = record.options_model()() if contract == "reasoning_parser" else NoOptions()
    made: OutputParser = record.load()(options, OutputParserContext("", "", ""))
    return made


def stream_of(answer: Answer) -> ChatStream:
    thinking, calling = map(parser_of, ("reasoning_parser", "tool_parser"), answer.parsers)
    return ChatStream(tools=Tools(TOOLS), tool_parser=calling, reasoning_parser=thinking, prompt=f"Hi{answer.prompt}")


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_an_answer_is_read(answer: Answer) -> None:
    def read(*pieces: str) -> Told:
        stream = stream_of(answer)
        return told([event for piece in pieces for event in stream.feed(piece)] + stream.finish())

    whole = read(answer.text)
    assert (whole.reasoning, whole.content) == (answer.reasoning, answer.content)
    assert whole.loaded == list(answer.calls)
    assert read(*one_by_one(answer.text)) == whole
    for at in range(1, len(answer.text)):
        assert read(answer.text[:at], answer.text[at:]) == whole, f"cut after {answer.text[:at]!r}"


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_an_answer_that_ends_anywhere_is_read(answer: Answer) -> None:
    """What is told of it is how the whole answer begins."""
    for at in range(len(answer.text)):
        found = stream_of(answer).collect(answer.text[:at])
        assert [one.name for one in found.calls] == [name for name, _ in answer.calls[: len(found.calls)]]
        done = [(one.name, json.loads(one.arguments)) for one in found.calls[:-1]]
        assert done == list(answer.calls[: len(done)])
        # A marker may be cut, too.
        assert answer.reasoning.startswith(found.reasoning.partition("<")[0].rstrip())
