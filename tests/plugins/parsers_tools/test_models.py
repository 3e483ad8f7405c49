"""Whole answers of today's models, thinking and calls, as their published formats describe them; at every cut."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jinja2
import pytest

from pegboard.conformance.streams import Told, feed, one_by_one, told
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.chat.tool_calls import ChatStream, Tools
from pegboard.toolkit.parsing.output_parser import EarlierCall, OutputParser, OutputParserContext
from tests.choosing import best
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
    Answer(_GPT, f"{_message('analysis', 'Hm.', '')}{_message('final', 'So.', '<|return|>')}", "Hm.", "So."),
    Answer(_GPT, f"{_message('analysis', 'Hm. <|channel|>fi', '')}{_TO_ROME}", "Hm. <|channel|>fi", "", (ROME,)),
    Answer(_GPT, f"{_ANALYSIS}<|channel|>fin", "2 + 2."),
    Answer(_GPT, "2 + 2.<|end|><|start|>assistant" + _message("final", "4.", ""), "2 + 2.", "4.", (), _ANALYSIS[:30]),
    Answer(_GPT, '{"a": "<|end|>"}', "", '{"a": "<|end|>"}'),
)

_GLM = ("qwen3", "glm")


def _glm(name: str, *pairs: tuple[str, str], line: str = "\n") -> str:
    tags = [f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in pairs]
    return f"<tool_call>{name}{line}{''.join(tags)}</tool_call>"


_XML = "say </arg_key> and <tool_call>x\n</tool_call> or"
GLM = (
    Answer(_GLM, f"\n<think>Hm.</think>\nI look.\n{_glm('weather', ('city', 'Rome'))}", "Hm.", "I look.", (ROME,)),
    Answer(_GLM, _glm("weather", ("city", "Oslo"), ("days", "2"), line=""), calls=(OSLO,)),
    Answer(_GLM, _glm("weather", ("city", "Rome")) + "\n" + _glm("now"), calls=(ROME, NOW)),
    Answer(_GLM, _glm("ship", ("zip", "01234")) + " Done.", "", "Done.", (("ship", {"zip": "01234"}),)),
    Answer(
        _GLM, _glm("ship", ("items", '["1"]'), ("weight", "2.5")), calls=(("ship", {"items": ["1"], "weight": 2.5}),)
    ),
    Answer(_GLM, _glm("note", ("text", ' two\n "lines"\n')), calls=(("note", {"text": ' two\n "lines"\n'}),)),
    Answer(_GLM, _glm("note", ("text", _XML)), calls=(("note", {"text": _XML}),)),
    Answer(_GLM, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</tool_call>", calls=(ROME,)),
    # An end of a value is text where nothing follows that may follow one; an end of a call may be forgotten.
    Answer(_GLM, _glm("note", ("text", "a</arg_value> b")), calls=(("note", {"text": "a</arg_value> b"}),)),
    Answer(_GLM, _glm("weather", ("city", "Rome")).removesuffix("</tool_call>") + _glm("now"), calls=(ROME, NOW)),
    Answer(_GLM, _glm("ship", ("items", "['1', '2']")) + " Done.", "", "Done.", (("ship", {"items": ["1", "2"]}),)),
    Answer(_GLM, f"{_glm('nope', ('a', '1'))}\n{_glm('now')}", "", _glm("nope", ("a", "1")), (NOW,)),
    Answer(_GLM, "<think>Call <tool_call>now</tool_call>?</think>No.", "Call <tool_call>now</tool_call>?", "No."),
    Answer(_GLM, "A <tool_call> now", "", "A <tool_call> now"),
)

_MINIMAX = ("deepseek_r1", "minimax_m2")


def _invoke(name: str, *pairs: tuple[str, str]) -> str:
    tags = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in pairs)
    return f'<invoke name="{name}">\n{tags}</invoke>\n'


def _section(*calls: str) -> str:
    return f"<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>"


MINIMAX = (
    Answer(
        _MINIMAX,
        f"Hm.\n</think>\n\nI look.\n{_section(_invoke('weather', ('city', 'Rome')), _invoke('now'))}",
        "Hm.",
        "I look.",
        (ROME, NOW),
        "<think>\n",
    ),
    Answer(_MINIMAX, _section(_invoke("weather", ("city", "Oslo"), ("days", "2"))) + "\nSo.", "", "So.", (OSLO,)),
    Answer(_MINIMAX, _section(_invoke("ship", ("phone", "030"))), calls=(("ship", {"phone": "030"}),)),
    Answer(_MINIMAX, _invoke("weather", ("city", "Rome")), calls=(ROME,)),
    Answer(
        _MINIMAX, _section(_invoke("note", ("text", '<p a="b"></p>'))), calls=(("note", {"text": '<p a="b"></p>'}),)
    ),
    Answer(
        _MINIMAX,
        _section(_invoke("note", ("text", "</invoke> is a tag"))),
        calls=(("note", {"text": "</invoke> is a tag"}),),
    ),
    Answer(
        _MINIMAX,
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</invoke>\n</minimax:tool_call>',
        calls=(ROME,),
    ),
    Answer(
        _MINIMAX, _section(_invoke("weather", ("city", "Rome"))).removesuffix("</minimax:tool_call>"), calls=(ROME,)
    ),
)

_DEEPSEEK = ("deepseek_r1", "deepseek_v32")


def _dsml(text: str) -> str:
    return text.replace("<", "<｜DSML｜").replace("<｜DSML｜/", "</｜DSML｜")  # noqa: RUF001 - its own characters


_CITY = '<parameter name="city" string="true">Rome</parameter>\n'
DEEPSEEK = (
    Answer(
        _DEEPSEEK,
        "Hm.</think>I look.\n\n"
        + _dsml(f'<function_calls>\n<invoke name="weather">\n{_CITY}</invoke>\n</function_calls>'),
        "Hm.",
        "I look.",
        (ROME,),
        "<think>",
    ),
    # What the attribute says is a string is one, and what the schema says is only a string, too.
    Answer(
        _DEEPSEEK,
        _dsml(
            '<function_calls>\n<invoke name="ship">\n<parameter name="id" string="true">7</parameter>\n'
            '<parameter name="version" string="false">1.10</parameter>\n'
            '<parameter name="weight" string="false">7</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
            "</function_calls>"
        ),
        calls=(("ship", {"id": "7", "version": "1.10", "weight": 7}), NOW),
        prompt="</think>",
    ),
    Answer(_DEEPSEEK, _dsml(f'<tool_calls>\n<invoke name="weather">\n{_CITY}</invoke>\n</tool_calls>'), calls=(ROME,)),
)

_KIMI = ("deepseek_r1", "kimi_k2")


def _kimi(*calls: tuple[str, str]) -> str:
    inside = (
        f"<|tool_call_begin|>{key}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>" for key, arguments in calls
    )
    return f"<|tool_calls_section_begin|>{''.join(inside)}<|tool_calls_section_end|>"


_ROME_JSON = '{"city": "Rome"}'
_LIST = '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]'
KIMI = (
    Answer(
        _KIMI,
        "<think>Hm.</think>I look." + _kimi(("functions.weather:0", _ROME_JSON), ("functions.now:1", "{}")),
        "Hm.",
        "I look.",
        (ROME, NOW),
    ),
    Answer(_KIMI, _kimi(("functions.weather:3 ", f"\n{_ROME_JSON}\n")), calls=(ROME,)),
    Answer(_KIMI, _kimi(("weather", _ROME_JSON)).removesuffix("<|tool_calls_section_end|>"), calls=(ROME,)),
    Answer(
        _KIMI,
        _kimi(("functions.note:0", '{"text": "<|tool_call_end|>"}')),
        calls=(("note", {"text": "<|tool_call_end|>"}),),
    ),
    Answer(_KIMI, _kimi(("tool_call_1", "{}")), "", _kimi(("tool_call_1", "{}"))),
)
LISTS = (
    Answer(("granite", "granite"), f"<|tool_call|>{_LIST}", calls=(ROME, NOW)),
    Answer(
        ("granite", "granite"),
        f"Here is my thought process: Hm.\n\nHere is my response:\nI look.<|tool_call|>{_LIST}<|/tool_call|>",
        "Hm.",
        "I look.",
        (ROME, NOW),
    ),
    Answer(("hunyuan", "hunyuan"), "<think>\nHm.\n</think>\n<answer>\nFour.\n</answer>", "Hm.", "Four."),
    Answer(("hunyuan", "hunyuan"), "<think>Hm.</think><answer>a </answer> b", "Hm.", "a </answer> b"),
    Answer(("hunyuan", "hunyuan"), f"<think>\nHm.\n</think>\n<tool_calls>{_LIST}</tool_calls>", "Hm.", "", (ROME, NOW)),
    Answer(
        ("deepseek_r1", "olmo3"),
        '<think>Hm.</think>I look.\n<function_calls>\nweather(city="Oslo", days=2)\nnow()\n</function_calls>',
        "Hm.",
        "I look.",
        (OSLO, NOW),
    ),
    Answer(
        ("deepseek_r1", "olmo3"),
        '<function_calls>note(text="</function_calls> (x)", title=null)</function_calls>',
        calls=(("note", {"text": "</function_calls> (x)", "title": None}),),
    ),
)

_GEMMA = ("gemma4", "gemma4")
_THOUGHT = "<|channel>thought\n2 + 2.\n<channel|>"


def _gemma(call: str) -> str:
    return f"<|tool_call>call:{call}<tool_call|>"


_TO_OSLO_AND_NOW = _gemma('weather{city:<|"|>Oslo<|"|>,days:2}') + _gemma("now{}")
_ANYTHING = 'a "<|tool_call>" \\n \'} <tool_call|>\n<|x|>'
GEMMA = (
    Answer(_GEMMA, f"{_THOUGHT}Four.", "2 + 2.", "Four."),
    Answer(_GEMMA, "<|channel>thought\n<channel|>Four.", "", "Four."),
    Answer(_GEMMA, "Four.", "", "Four.", (), "<|channel>thought\n<channel|>"),
    Answer(_GEMMA, "2 + 2.<channel|>Four.", "2 + 2.", "Four.", (), "<|channel>thought\n"),
    Answer(_GEMMA, f"{_THOUGHT}I look.\n{_TO_OSLO_AND_NOW}<|tool_response>", "2 + 2.", "I look.", (OSLO, ("now", {}))),
    # A thought whose end was forgotten.
    Answer(_GEMMA, f"<|channel>thought\nHm.\n{_gemma('now{}')}", "Hm.", "", (("now", {}),)),
    Answer(_GEMMA, _gemma(f'note{{text:<|"|>{_ANYTHING}<|"|>}}'), calls=(("note", {"text": _ANYTHING}),)),
    Answer(
        _GEMMA,
        _gemma('ship{address:{next:{<|"|>a b<|"|>:[1,true,None],c:{}}},items:[<|"|>1<|"|>,<|"|><|"|>],weight:-2.5e3}'),
        calls=(
            (
                "ship",
                {
                    "address": {"next": {"a b": [1, True, None], "c": {}}},
                    "items": ["1", ""],
                    "weight": -2500.0,
                },
            ),
        ),
    ),
    # Quotes and spaces as JSON has them.
    Answer(_GEMMA, _gemma('weather{"city": "Oslo", days : 2}'), calls=(OSLO,)),
    # Strings whose tokens were forgotten.
    Answer(_GEMMA, _gemma("weather{city: Oslo ,days:2}"), calls=(OSLO,)),
    Answer(
        _GEMMA,
        _gemma("ship{items:[New York,10:30,2026-01-02,O'Hare],address:{next:{a:nothing}},weight:-1.5}"),
        calls=(
            (
                "ship",
                {
                    "items": ["New York", "10:30", "2026-01-02", "O'Hare"],
                    "address": {"next": {"a": "nothing"}},
                    "weight": -1.5,
                },
            ),
        ),
    ),
    Answer(_GEMMA, _gemma('weather{city:<|"|>Rome<|"|>}').removesuffix("<tool_call|>"), calls=(ROME,)),
    Answer(_GEMMA, f"{_gemma('nope{a:1}')} {_gemma('now{}')}", "", _gemma("nope{a:1}"), (("now", {}),)),
    Answer(_GEMMA, "A <|tool_call> is a token: call:now{}", "", "A <|tool_call> is a token: call:now{}"),
)

ANSWERS = (*GEMMA, *HARMONY, *GLM, *MINIMAX, *DEEPSEEK, *KIMI, *LISTS)


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


_CALLS: list[EarlierCall] = [
    {"name": "weather", "arguments": {"city": "Oslo", "days": 2}},
    {"name": "now", "arguments": {}},
]
TEMPLATES = {
    "gemma4": "{% for c in calls %}<|tool_call>call:{{ c.function.name }}{ "
    "{%- for k, v in c.function.arguments.items() %}{{ k }}:{{ '<|\"|>' ~ v ~ '<|\"|>' if v is string else v }}"
    "{{ ',' if not loop.last }}{% endfor -%} }<tool_call|>{% endfor %}",
    "harmony": "{% for c in calls %}{% if not loop.first %}<|start|>assistant{% endif %}<|channel|>commentary to="
    "functions.{{ c.function.name }} <|constrain|>json<|message|>{{ c.function.arguments | tojson }}<|call|>"
    "{% endfor %}",
    "glm": "{% for c in calls %}{% if not loop.first %}{{ '\\n' }}{% endif %}<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "minimax_m2": '<minimax:tool_call>\n{% for c in calls %}<invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">{{ v if v is string else v | tojson }}'
    "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>",
    "deepseek_v32": "{% set d = '｜DSML｜' %}<{{ d }}function_calls>\n{% for c in calls %}"  # noqa: RUF001
    '<{{ d }}invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
    "<{{ d }}parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    "{{ v if v is string else v | tojson }}</{{ d }}parameter>\n{% endfor %}</{{ d }}invoke>\n{% endfor %}"
    "</{{ d }}function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>functions.{{ c.function.name }}:"
    "{{ loop.index0 }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>",
    "granite": "<|tool_call|>{{ calls | map(attribute='function') | list | tojson }}",
    "hunyuan": "<tool_calls>{{ calls | map(attribute='function') | list | tojson }}</tool_calls>",
}
"""How the models' templates write earlier calls."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_written_as_the_template_writes_them(name: str) -> None:
    """And `auto` knows the parser by the template."""
    environment = jinja2.Environment(keep_trailing_newline=True)
    environment.filters["tojson"] = json.dumps
    text = environment.from_string(TEMPLATES[name]).render(calls=[{"function": one} for one in _CALLS])
    candidates = [one for one in REGISTRY.providers("tool_parser") if one.provider.rank >= 0]
    found = best(candidates, OutputParserContext(TEMPLATES[name], "", ""))
    assert found is not None
    parser: OutputParser = found(NoOptions(), OutputParserContext(TEMPLATES[name], "", ""))
    assert type(parser) is type(parser_of("tool_parser", name))
    assert parser.write_calls(_CALLS) == text
    assert feed(parser.stream(TOOLS), [text]).loaded == [OSLO, NOW]


def test_ids_that_a_model_writes_are_those_of_the_answer() -> None:
    """And those that are there already are not given again: a grammar numbers all calls alike."""
    text = _kimi(("functions.now:0", "{}"), ("functions.now:0", "{}"), ("weather:4", _ROME_JSON), ("now", "{}"))
    calls = parser_of("tool_parser", "kimi_k2")

    def ids(prompt: str) -> list[str]:
        return [one.id for one in ChatStream(tools=Tools(TOOLS), tool_parser=calls, prompt=prompt).collect(text).calls]

    assert ids("") == ["functions.now:0", "functions.now:1", "functions.weather:4", "functions.now:2"]
    earlier = _kimi(("functions.now:0", "{}"), ("functions.weather:1", _ROME_JSON))
    assert ids(earlier) == ["functions.now:1", "functions.now:2", "functions.weather:4", "functions.now:3"]


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_an_answer_that_ends_anywhere_is_read(answer: Answer) -> None:
    """What is told of it is how the whole answer begins."""
    for at in range(len(answer.text)):
        found = stream_of(answer).collect(answer.text[:at])
        if answer.text[:at] == "<think>Call <tool_call>now</tool_call>":
            # As if the end of the thought had been forgotten.
            assert [one.name for one in found.calls] == ["now"]
            continue
        assert [one.name for one in found.calls] == [name for name, _ in answer.calls[: len(found.calls)]]
        done = [(one.name, json.loads(one.arguments)) for one in found.calls[:-1]]
        assert done == list(answer.calls[: len(done)])
        # A marker may be cut, too.
        thought = found.reasoning.partition("<")[0].rstrip()
        assert answer.reasoning.startswith(thought) or thought.startswith(answer.reasoning or "\0")


@pytest.mark.parametrize("name", [one.name for one in REGISTRY.providers("tool_parser") if one.name != "plain"])
@pytest.mark.parametrize("offered", [True, False])
def test_names_may_be_as_long_as_anthropics(name: str, offered: bool) -> None:
    parser, long = parser_of("tool_parser", name), "mcp__" + "x" * 123
    text = parser.write_calls([{"name": long, "arguments": {"city": "Rome"}}])
    for pieces in ([text], one_by_one(text)):
        found = feed(parser.stream(({"name": long},) if offered else ()), pieces)
        assert (found.content, found.loaded) == ("", [(long, {"city": "Rome"})])
