"""Outputs as models write them, in the formats of the parsers, with the calls and the content that they stand for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pegboard.toolkit.parsing.output_parser import ToolFunction

_STRING = {"type": "string"}
TOOLS: tuple[ToolFunction, ...] = (
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": _STRING, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city"],
        },
    },
    {
        "name": "ship",
        "parameters": {
            "type": "object",
            "properties": {
                "zip": {"anyOf": [_STRING, {"type": "null"}]},
                "phone": {"$ref": "#/$defs/phone"},
                "version": {"allOf": [{"$ref": "#/$defs/text"}], "description": "As in 1.10."},
                "plan": {"const": "1"},
                "code": {"oneOf": [_STRING, {"type": "boolean"}]},
                "weight": {"type": "number"},
                "id": {"type": ["integer", "string"]},
                "address": {"$ref": "#/$defs/address"},
                "items": {"type": "array", "items": {"$ref": "#/$defs/text"}},
            },
            "$defs": {
                "text": _STRING,
                "phone": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]},
                "address": {"type": "object", "properties": {"next": {"$ref": "#/$defs/address"}}},
            },
        },
    },
    {"name": "note", "parameters": {"type": "object", "properties": {"text": _STRING, "title": _STRING}}},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
)


@dataclass(frozen=True)
class Output:
    """A text, the parser that reads it, and what it stands for: calls with their arguments, and the content beside."""

    parser: str
    text: str
    calls: tuple[tuple[str, Any], ...]
    content: str = ""

    def __str__(self) -> str:
        return f"{self.parser}: {self.text[:40]!r}"


ROME = ("weather", {"city": "Rome"})
OSLO = ("weather", {"city": "Oslo", "days": 2})
NOW: tuple[str, Any] = ("now", {})
_NOPE = '{"name": "nope", "arguments": {"a": [1, "]"]}}'


def _call(call: tuple[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]})


def _hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def _xml(name: str, inside: str) -> str:
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def _value(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


HERMES = (
    Output("hermes", _hermes(_call(ROME)), (ROME,)),
    Output("hermes", f"I will look.\n\n{_hermes(_call(ROME), _call(OSLO))}", (ROME, OSLO), "I will look."),
    Output("hermes", f"{_hermes(_call(ROME))}\n\nThat was it.", (ROME,), "That was it."),
    Output("hermes", f"<tool_call>[{_call(ROME)}, {_call(OSLO)}]</tool_call>", (ROME, OSLO)),
    Output("hermes", f"<tool_call>[{_call(ROME)}, {_NOPE}, {_call(NOW)}]</tool_call>", (ROME, NOW), _NOPE),
    Output("hermes", f"<tool_call>[{_NOPE}, {_call(NOW)}]</tool_call> Done.", (NOW,), f"{_NOPE} Done."),
    Output(
        "hermes",
        f"See: <tool_call>[{_NOPE}, {_NOPE}]</tool_call>",
        (),
        f"See: <tool_call>[{_NOPE}, {_NOPE}]</tool_call>",
    ),
    Output("hermes", f"<tool_call>[{_call(NOW)}, {_NOPE}, {_NOPE}]</tool_call>", (NOW,), f"{_NOPE}\n{_NOPE}"),
    Output("hermes", _hermes(_NOPE, _call(NOW)), (NOW,), _hermes(_NOPE)),
    Output("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Rome",}}</tool_call> Hm.', (ROME,), "Hm."),
    Output("hermes", '<tool_call>{"name": "weather", "arguments": {\'city\': \'Rome\'}}</tool_call>', (ROME,)),
    Output("hermes", '<tool_call>{"name": "weather", "arguments": {city: "Oslo", days: 2}}</tool_call>', (OSLO,)),
    Output(
        "hermes", '<tool_call>{"name": "note", "arguments": {"text": NaN}}</tool_call>', (("note", {"text": None}),)
    ),
    Output("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>', (ROME,)),
    Output("hermes", '<tool_call>\n{"arguments": {"city": "Rome"}, "name": "weather"}\n</tool_call>', (ROME,)),
    Output("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', (NOW,)),
    Output(
        "hermes",
        _hermes(_call(("note", {"text": '</tool_call> }} \\ "x" 漢😀'}))),
        (("note", {"text": '</tool_call> }} \\ "x" 漢😀'}),),
    ),
    Output(
        "hermes",
        '<tool_call>{"name": "note", "arguments": {"text": "C:\\dir\nnew"}}</tool_call>',
        (("note", {"text": "C:\\dir\nnew"}),),
    ),
    Output("hermes", 'A <tool_call> is a tag, {"a": 1} is JSON.', (), 'A <tool_call> is a tag, {"a": 1} is JSON.'),
)

_TAGS = ("Doc:\n</tool_call>\nmore", "x</parameter>y", "a\n</parameter>\nb", "a\n</function>\nb", "</tool_call> <b>")
"""Texts with the tags of the format in them."""

XML = (
    *(
        Output("qwen3_coder", _xml("note", _value("text", text)) + after, (("note", {"text": text}), *calls), content)
        for text in _TAGS
        for after, calls, content in (("", (), ""), (" Done.", (), "Done."), (_xml("now", ""), (NOW,), ""))
    ),
    Output(
        "qwen3_coder",
        _xml("note", _value("text", _TAGS[0]) + _value("title", _TAGS[1])),
        (("note", {"text": _TAGS[0], "title": _TAGS[1]}),),
    ),
    # Ends that were forgotten: of the function, and of the call.
    Output("qwen3_coder", _xml("weather", _value("city", "Rome")).replace("</function>\n", ""), (ROME,)),
    Output(
        "qwen3_coder",
        f"<tool_call>\n<function=weather>\n{_value('city', 'Rome')}{_xml('now', '')} Done.",
        (ROME, NOW),
        "Done.",
    ),
    Output(
        "qwen3_coder",
        f"<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</tool_call>\nAnd: {_xml('now', '')} Done.",
        (ROME, NOW),
        "And: Done.",
    ),
    # Literals of Python, where the schema takes no string.
    Output(
        "qwen3_coder",
        _xml("ship", _value("address", "{'next': {'a': (True, None)}}") + _value("items", "['1', \"2\",]")),
        (("ship", {"address": {"next": {"a": [True, None]}}, "items": ["1", "2"]}),),
    ),
    Output("qwen3_coder", _xml("note", _value("text", "{'a': 1}")), (("note", {"text": "{'a': 1}"}),)),
    Output("qwen3_coder", _xml("ship", _value("address", "{1, 2}")), (("ship", {"address": "{1, 2}"}),)),
    Output("qwen3_coder", _xml("ship", _value("items", "f('x')")), (("ship", {"items": "f('x')"}),)),
    Output("qwen3_coder", _xml("weather", _value("city", "Rome")), (ROME,)),
    Output("qwen3_coder", _xml("weather", _value("city", "Oslo") + _value("days", "2")), (OSLO,)),
    Output("qwen3_coder", _xml("ship", _value("zip", "12345")), (("ship", {"zip": "12345"}),)),
    Output("qwen3_coder", _xml("ship", _value("zip", "null")), (("ship", {"zip": None}),)),
    Output("qwen3_coder", _xml("ship", _value("phone", "0049301234")), (("ship", {"phone": "0049301234"}),)),
    Output("qwen3_coder", _xml("ship", _value("version", "1.10")), (("ship", {"version": "1.10"}),)),
    Output("qwen3_coder", _xml("ship", _value("plan", "1")), (("ship", {"plan": "1"}),)),
    Output("qwen3_coder", _xml("ship", _value("code", "7") + _value("id", "7")), (("ship", {"code": "7", "id": 7}),)),
    Output("qwen3_coder", _xml("ship", _value("code", "true")), (("ship", {"code": True}),)),
    Output("qwen3_coder", _xml("ship", _value("id", "1234567890123456789")), (("ship", {"id": 1234567890123456789}),)),
    Output("qwen3_coder", _xml("ship", _value("weight", "2.50")), (("ship", {"weight": 2.5}),)),
    Output("qwen3_coder", _xml("ship", _value("weight", "NaN")), (("ship", {"weight": "NaN"}),)),
    Output(
        "qwen3_coder",
        _xml("ship", _value("address", '{"next": {\n  "a": [1, true]\n}}')),
        (("ship", {"address": {"next": {"a": [1, True]}}}),),
    ),
    Output("qwen3_coder", _xml("ship", _value("items", '["1", "2"]')), (("ship", {"items": ["1", "2"]}),)),
    Output("qwen3_coder", _xml("weather", "<parameter=city>\nOslo\n<parameter=days>\n2\n</parameter>\n"), (OSLO,)),
    Output(
        "qwen3_coder",
        _xml("weather", "<parameter=days>\n2\n<parameter=city>\nOslo\n"),
        (("weather", {"days": 2, "city": "Oslo"}),),
    ),
    Output("qwen3_coder", _xml("ship", "<parameter=id>\n5\n") + "\nDone.", (("ship", {"id": 5}),), "Done."),
    Output(
        "qwen3_coder",
        _xml("note", "<parameter=text>\nlong\n\nlines\n") + "\n" + _xml("now", ""),
        (("note", {"text": "long\n\nlines"}), NOW),
    ),
    Output(
        "qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</tool_call>\nDone.", (ROME,), "Done."
    ),
    Output(
        "qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</tool_call>", (ROME,)
    ),
    Output("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</function>", (ROME,)),
    Output(
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>Oslo<parameter=days>2</function></tool_call>",
        (OSLO,),
    ),
    Output("qwen3_coder", "<function=weather>\n<parameter=city>\nRome\n</function>\nDone.", (ROME,), "Done."),
    Output(
        "qwen3_coder",
        _xml("note", "<parameter=text>\n<parameter=title>\nx\n</parameter>\n"),
        (("note", {"text": "", "title": "x"}),),
    ),
    Output(
        "qwen3_coder",
        _xml("note", _value("text", "say </function> and\n</function>\n<parameter=x> </tool_call>")),
        (("note", {"text": "say </function> and\n</function>\n<parameter=x> </tool_call>"}),),
    ),
    Output(
        "qwen3_coder",
        f"{_xml('weather', _value('city', 'Rome'))}\n{_xml('nope', _value('a', '1'))}\n{_xml('now', '')}",
        (ROME, NOW),
        _xml("nope", _value("a", "1")),
    ),
)

MISTRAL = (
    Output("mistral", f"[TOOL_CALLS] [{_call(ROME)}]", (ROME,)),
    Output("mistral", f"[TOOL_CALLS] [{_call(ROME)}, {_NOPE}, {_call(NOW)}]", (ROME, NOW), _NOPE),
    Output("mistral", f"Hm. [TOOL_CALLS] [{_NOPE}, {_call(NOW)},]", (NOW,), f"Hm. \n{_NOPE}"),
    Output("mistral", f"[TOOL_CALLS] [{_NOPE}]", (), f"[TOOL_CALLS] [{_NOPE}]"),
    Output("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}', (ROME, NOW)),
    Output(
        "mistral",
        '[TOOL_CALLS]weather{"city": "Rome"}[TOOL_CALLS]nope{}[TOOL_CALLS]now{}',
        (ROME, NOW),
        "[TOOL_CALLS]nope{}",
    ),
    Output("mistral", '[TOOL_CALLS]weather[CALL_ID]abcdefgh1[ARGS]{"city": "Rome"}', (ROME,)),
    Output(
        "mistral",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}, "id": "VvvODy9mT"}] ok',
        (ROME,),
        "ok",
    ),
)

PYTHONIC = (
    Output("pythonic", "[weather(city='Rome')]", (ROME,)),
    Output("pythonic", "[weather(city='Rome'), nope(a=[1, ')']), now()]", (ROME, NOW), "nope(a=[1, ')'])"),
    Output("pythonic", "[nope(), now()]\nThere.", (NOW,), "nope()\nThere."),
    Output("pythonic", "[nope(), nope(a=1)]", (), "[nope(), nope(a=1)]"),
    Output("pythonic", '<|python_start|>[weather(city="Oslo", days=2), now()]<|python_end|>', (OSLO, NOW)),
    Output("pythonic", "[note(text='it\\'s', title=\"a\\nb\",)]", (("note", {"text": "it's", "title": "a\nb"}),)),
    Output("pythonic", "[now] is a list", (), "[now] is a list"),
)

_P = "parameters"
LLAMA = (
    Output("llama3_json", _call(ROME, _P), (ROME,)),
    Output("llama3_json", f"<|python_tag|>{_call(ROME, _P)}; {_call(OSLO, _P)}", (ROME, OSLO)),
    Output("llama3_json", f"{_call(ROME, _P)}; {_NOPE}; {_call(NOW, _P)}", (ROME, NOW), _NOPE),
    Output("llama3_json", f"{_NOPE}; {_call(NOW, _P)}", (NOW,), _NOPE),
    Output("llama3_json", f"{_NOPE}; {_NOPE} ", (), f"{_NOPE}; {_NOPE} "),
    Output("llama3_json", f"{_call(NOW, _P)}; {_NOPE}\nThat is all.", (NOW,), f"{_NOPE}\nThat is all."),
    Output(
        "llama3_json",
        '{"name": "Ada", "parameters": {"age": 7}} is her.',
        (),
        '{"name": "Ada", "parameters": {"age": 7}} is her.',
    ),
)

_SEP, _BEGIN, _END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
_OUTER, _OUTER_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
DEEPSEEK = (
    Output(
        "deepseek_v3",
        f'{_OUTER}{_BEGIN}function{_SEP}weather\n```json\n{{"city": "Rome"}}\n```{_END}{_OUTER_END}',
        (ROME,),
    ),
    Output(
        "deepseek_v3",
        f'{_OUTER}{_BEGIN}weather{_SEP}{{"city": "Rome"}}{_END}{_BEGIN}now{_SEP}{{}}{_END}{_OUTER_END}',
        (ROME, NOW),
    ),
    Output(
        "deepseek_v3", f'{_OUTER}{_BEGIN}weather{_SEP}{{"city": "Rome",}}{_END}{_OUTER_END}\nDone.', (ROME,), "Done."
    ),
)

OUTPUTS = (*HERMES, *XML, *MISTRAL, *PYTHONIC, *LLAMA, *DEEPSEEK)
