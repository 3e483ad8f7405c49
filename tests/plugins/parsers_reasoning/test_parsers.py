"""How models that think aloud begin and end it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pegboard.conformance.streams import Told, feed, one_by_one
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.registry.registry import Registry
from pegboard.plugins.parsers_reasoning.options import MarkerOptions, ThinkOptions
from pegboard.plugins.parsers_reasoning.parsers import GraniteParser, MarkedParser, QwenParser, ThinkParser
from pegboard.toolkit.chat.tool_calls import ChatStream, Tools
from pegboard.toolkit.parsing.output_parser import OutputParserContext
from tests.choosing import best

CTX = OutputParserContext("", "", "")
QWEN = (
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- if enable_thinking is defined and enable_thinking is "
    "false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
R1 = "{% set content = message['content'].split('</think>')[-1] %}<｜Assistant｜><think>\\n"  # noqa: RUF001


def read(parser: ThinkParser, text: str, prompt: str = "") -> Told:
    found = feed(parser.stream(prompt=prompt), [text])
    assert feed(parser.stream(prompt=prompt), one_by_one(text)) == found
    return found


def test_qwen_with_and_without_thinking() -> None:
    parser = QwenParser(NoOptions(), CTX)
    header = "<|im_start|>assistant\n"
    found = read(parser, "<think>\nHm, 2 + 2.\n</think>\n\nFour.", header)
    assert (found.reasoning, found.content) == ("Hm, 2 + 2.", "Four.")
    found = read(parser, "Four.", header + "<think>\n\n</think>\n\n")
    assert (found.reasoning, found.content) == ("", "Four.")
    found = read(parser, "Hm, 2 + 2.\n</think>\n\nFour.", header + "<think>\n")
    assert (found.reasoning, found.content) == ("Hm, 2 + 2.", "Four.")


def test_a_model_that_repeats_the_marker() -> None:
    found = read(ThinkParser(ThinkOptions(), CTX), "<think>\nHm.</think>Four.", "<think>\n")
    assert (found.reasoning, found.content) == ("Hm.", "Four.")


def test_answers_may_be_said_to_begin_with_thinking() -> None:
    eager = ThinkParser(ThinkOptions(starts_open=True), CTX)
    assert read(eager, "Hm.</think>Four.").reasoning == "Hm."
    assert read(eager, "<think>Hm.</think>Four.").reasoning == "Hm."
    assert read(eager, "Four.", "<think>\n\n</think>\n\n").content == "Four."
    assert read(ThinkParser(ThinkOptions(), CTX), "Hm.</think>Four.").content == "Hm.</think>Four."


@pytest.mark.parametrize("parser", [ThinkParser(ThinkOptions(starts_open=True), CTX), QwenParser(NoOptions(), CTX)])
@pytest.mark.parametrize("prompt", ["", "<think>\n"])
def test_an_answer_that_a_grammar_describes_is_no_thought(parser: ThinkParser, prompt: str) -> None:
    """Unless the grammar lets the model write the marker."""
    for text, reasoning in (('{"a": 1}', ""), ('<think>Hm.</think>{"a": 1}', "Hm.")):
        answer = ChatStream(reasoning_parser=parser, prompt=prompt, constrained=True).collect(text)
        assert (answer.content, answer.reasoning) == ('{"a": 1}', reasoning)


def test_a_call_that_is_forced_is_no_thought() -> None:
    record = Registry.discover().get("tool_parser", "hermes")
    assert record is not None
    tools = Tools(({"name": "now", "parameters": {}},), "required")
    stream = ChatStream(
        tools=tools,
        tool_parser=record.load()(NoOptions(), CTX),
        reasoning_parser=ThinkParser(ThinkOptions(starts_open=True), CTX),
        constrained=True,
    )
    answer = stream.collect('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert [call.name for call in answer.calls] == ["now"]
    assert (answer.content, answer.reasoning) == ("", "")


def test_only_the_end_of_the_prompt_counts() -> None:
    prompt = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert read(ThinkParser(ThinkOptions(), CTX), "A marker.", prompt).content == "A marker."


def test_markers_of_the_config() -> None:
    parser = MarkedParser(MarkerOptions(begin="◁think▷", end="◁/think▷", special_tokens=True), CTX)
    assert not parser.skip_special_tokens
    found = read(parser, "◁think▷Hm <think>.◁/think▷Four.")
    assert (found.reasoning, found.content) == ("Hm <think>.", "Four.")
    assert MarkedParser(MarkerOptions(), CTX).skip_special_tokens
    for bad in ({"begin": ""}, {"end": "x" * 65}, {"start": "x"}):
        with pytest.raises(ValidationError):
            MarkerOptions(**bad)  # type: ignore[arg-type]


GRANITE_2 = "{{ 'Begin your thoughts with: Here is my thought process: and your answer with: Here is my response:' }}"
GRANITE_3 = "{{ 'Write your thoughts between <think></think> and your response between <response></response>.' }}"


def read_everywhere(parser: ThinkParser, text: str, prompt: str = "") -> tuple[str, str]:
    """Return thought and answer, whichever way the text is cut in two, or a character at a time."""
    found = read(parser, text, prompt)
    for at in range(1, len(text)):
        assert feed(parser.stream(prompt=prompt), [text[:at], text[at:]]) == found, f"cut after {text[:at]!r}"
    return found.reasoning, found.content


@pytest.mark.parametrize("thought", ["Here is my thought process:", "Here's my thought process:"])
@pytest.mark.parametrize("response", ["Here is my response:", "Here's my response:"])
def test_both_forms_of_granites_sentences(thought: str, response: str) -> None:
    parser = GraniteParser(NoOptions(), OutputParserContext(GRANITE_2, "", ""))
    assert read_everywhere(parser, f"{thought} Hm.\n\n{response}\nFour.") == ("Hm.", "Four.")
    assert read_everywhere(parser, f"Here's {response} Four.") == ("", f"Here's {response} Four.")
    form = parser.thought_form()
    assert form is not None
    assert response in form.ends


def test_granite_with_tags() -> None:
    parser = GraniteParser(NoOptions(), OutputParserContext(GRANITE_3, "", ""))
    text = "<think>\nHm.\n</think>\n\n<response>\nFour.\n</response>"
    assert read_everywhere(parser, text) == ("Hm.", "Four.")
    assert read_everywhere(parser, text.removeprefix("<think>"), "<think>") == ("Hm.", "Four.")
    assert read_everywhere(parser, "<think>Hm.</think>Four.") == ("Hm.", "Four.")
    assert read_everywhere(parser, "<think>Hm.</think><response>a </response> b") == ("Hm.", "a </response> b")
    assert read_everywhere(parser, "<response>Four.</response>") == ("", "Four.")


GRANITES = [(GRANITE_2, "granite"), (GRANITE_3, "granite")]


@pytest.mark.parametrize(
    ("template", "name"), [*GRANITES, (QWEN, "qwen3"), (R1, "deepseek_r1"), ("{{ messages }}", "plain")]
)
def test_auto_goes_by_the_template(template: str, name: str) -> None:
    candidates = [one for one in Registry.discover().providers("reasoning_parser") if one.provider.rank >= 0]
    found = best(candidates, OutputParserContext(template, "", ""))
    assert found is not None
    assert {one.name for one in candidates if one.load() is found} == {name}
