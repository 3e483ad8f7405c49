"""Formats as models really write them, with the slips that they make."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.conformance.streams import Told, feed, one_by_one, sample
from pegboard.conformance.tool_parser import TOOLS
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampling import Grammar
from pegboard.core.registry.registry import Registry
from pegboard.plugins.grammar.api import GrammarBackend, GrammarContext
from pegboard.plugins.parsers_plain import REASONING_PARSER, TOOL_PARSER
from pegboard.plugins.parsers_tools.gemma import GemmaParser
from pegboard.plugins.parsers_tools.json_formats import DeepSeekParser, HermesParser, LlamaParser, MistralParser
from pegboard.plugins.parsers_tools.pythonic import PythonicParser
from pegboard.plugins.parsers_tools.xml_format import XmlParser
from pegboard.toolkit.parsing.output_parser import OutputParser, OutputParserContext
from pegboard.toolkit.parsing.text_stream import TextStream
from pegboard.toolkit.text.tokenizer import Tokenizer
from tests.choosing import best

ROME = ("get_weather", {"city": "Rome"})


def parser(cls: type[OutputParser], template: str = "") -> OutputParser:
    return cls(NoOptions(), OutputParserContext(template, "", ""))


def read(cls: type[OutputParser], text: str, tools: Sequence[Mapping[str, Any]] = TOOLS) -> Told:
    """What is told of a text, which is the same however it is cut."""
    found = feed(parser(cls).stream(tools), [text])  # type: ignore[arg-type]
    assert feed(parser(cls).stream(tools), one_by_one(text)) == found  # type: ignore[arg-type]
    return found


def calls(cls: type[OutputParser], text: str) -> list[tuple[str, Any]]:
    found = read(cls, text)
    assert found.content == "", found.content
    return found.loaded


class TestHermes:
    @pytest.mark.parametrize(
        "text",
        [
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
            '<tool_call>{"arguments": {"city": "Rome"}, "name": "get_weather"}</tool_call>',
            '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
            '<tool_call>{"name": "get_weather", "parameters": {"city": "Rome"}, "id": 7}</tool_call>',
            '<tool_call>[{"name": "get_weather", "arguments": {"city": "Rome"}}]</tool_call>',
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}\n</tool_call>',
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}',
            '\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n\n',
        ],
    )
    def test_one_call(self, text: str) -> None:
        assert calls(HermesParser, text) == [ROME]

    def test_several(self) -> None:
        one = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        for between in ("", "\n", "\n\n"):
            assert calls(HermesParser, f"{one}{between}{one}") == [ROME, ROME]
        listed = '<tool_call>[{"name": "now"}, {"name": "get_weather", "arguments": {"city": "Rome"}}]</tool_call>'
        assert calls(HermesParser, listed) == [("now", {}), ROME]
        # An end that was forgotten.
        assert calls(HermesParser, one.removesuffix("</tool_call>") + one) == [ROME, ROME]

    @pytest.mark.parametrize("arguments", ["", ', "arguments": null', ', "arguments": {}', ', "arguments": ""'])
    def test_no_arguments(self, arguments: str) -> None:
        assert calls(HermesParser, f'<tool_call>{{"name": "now"{arguments}}}</tool_call>') == [("now", {})]

    def test_text_in_arguments_is_no_marker(self) -> None:
        arguments = {"text": "</tool_call> <tool_call> }}", "options": {"a": {"b": "}"}}}
        written = parser(HermesParser).write_calls([{"name": "save", "arguments": arguments}])  # type: ignore[typeddict-item]
        assert calls(HermesParser, written) == [("save", arguments)]

    @pytest.mark.parametrize(
        "inside",
        [
            "", "x", "{}", '{"name": "get_weather"', '{"name": 5}', '{"name": "nobody", "arguments": {}}',
            '{"name": "now", "arguments": [1]}', '{"name": "now", "arguments": 5}', '{"arguments": {}}',
            '{"name": "now", "arguments": "not json"}', "[]", "[5]", '{"name": "now" "arguments": {}}',
            "now()", '"now"', '{"function": {"name": "now"}}',
        ],
    )  # fmt: skip
    def test_what_is_no_call_is_content(self, inside: str) -> None:
        text = f"Look: <tool_call>{inside}</tool_call> and so on"
        found = read(HermesParser, text)
        assert (found.content, found.calls) == (text, ())

    def test_broken_arguments_end_with_the_call(self) -> None:
        text = (
            '<tool_call>{"name": "get_weather", "arguments": {"city": Rome}}</tool_call> Hm. <tool_call>{"name": "now"}'
        )
        found = read(HermesParser, text)
        assert found.calls == (("get_weather", '{"city": Rome}}'), ("now", "{}"))
        assert found.content == "Hm."

    def test_instructions_show_the_format(self) -> None:
        text = parser(HermesParser).instructions([{**TOOLS[0], "strict": True}])
        line = next(one for one in text.splitlines() if one.startswith("{") and "get_weather" in one)
        assert json.loads(line) == {"type": "function", "function": TOOLS[0]}
        assert "<tool_call>\n{" in text


class TestLlama:
    @pytest.mark.parametrize(
        "text",
        [
            '{"name": "get_weather", "parameters": {"city": "Rome"}}',
            '\n {"type": "function", "name": "get_weather", "parameters": {"city": "Rome"}}',
            '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rome"}}',
            '<|python_tag|> {"name": "get_weather", "arguments": {"city": "Rome"}}\n',
        ],
    )
    def test_one_call(self, text: str) -> None:
        assert calls(LlamaParser, text) == [ROME]

    def test_several(self) -> None:
        one = '{"name": "get_weather", "parameters": {"city": "Rome"}}'
        for between in ("; ", ";", "\n", " ;\n"):
            assert calls(LlamaParser, f"{one}{between}{one}") == [ROME, ROME]
            assert calls(LlamaParser, f"<|python_tag|>{one}{between}{one}") == [ROME, ROME]

    @pytest.mark.parametrize(
        "text",
        [
            '{"name": "get_weather"}', '{"name": "get_weather", "age": 7}', '{"city": "Rome"}', "{",
            'Sure: {"name": "get_weather", "parameters": {"city": "Rome"}}', '{"name": "Ada", "parameters": {}}',
            '<|python_tag|>print("hi")', '{"parameters": {"city": "Rome"}}', '{"a": {"name": "now", "parameters": {}}}',
        ],
    )  # fmt: skip
    def test_other_json_is_content(self, text: str) -> None:
        found = read(LlamaParser, text)
        assert (found.content, found.calls) == (text, ())

    def test_text_before_the_token(self) -> None:
        found = read(LlamaParser, 'Let me see.<|python_tag|>{"name": "now", "parameters": {}}')
        assert (found.content, found.loaded) == ("Let me see.", [("now", {})])


class TestMistral:
    @pytest.mark.parametrize(
        "text",
        [
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}]',
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}, "id": "VvvODy9mT"}]',
            '[TOOL_CALLS]get_weather{"city": "Rome"}',
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}',
            '[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS]{"city": "Rome"}',
            '[TOOL_CALLS] {"name": "get_weather", "arguments": {"city": "Rome"}}',
        ],
    )
    def test_one_call(self, text: str) -> None:
        assert calls(MistralParser, text) == [ROME]

    def test_several(self) -> None:
        text = '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "get_weather", "arguments": {"city": "Rome"}}]'
        assert calls(MistralParser, text) == [("now", {}), ROME]
        text = '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'
        assert calls(MistralParser, text) == [("now", {}), ROME]

    def test_a_broken_one_leaves_the_next_alone(self) -> None:
        found = read(MistralParser, '[TOOL_CALLS]now[ARGS]{oops[TOOL_CALLS]get_weather{"city": "Rome"}')
        assert found.calls == (("now", "{oops"), ("get_weather", '{"city": "Rome"}'))

    @pytest.mark.parametrize(
        "text", ["[TOOL_CALLS]", "[TOOL_CALLS] none", "[TOOL_CALLS]nobody{}", "[TOOL", "[TOOL_CALLS]now x"]
    )
    def test_what_is_no_call_is_content(self, text: str) -> None:
        found = read(MistralParser, text)
        assert (found.content, found.calls) == (text, ())

    def test_ids_are_as_its_templates_want_them(self) -> None:
        one = parser(MistralParser).call_id()
        assert len(one) == 9
        assert one.isalnum()


class TestPythonic:
    @pytest.mark.parametrize(
        ("text", "arguments"),
        [
            ("[save(text='a', options={})]", {"text": "a", "options": {}}),
            ('[save(text="it\'s", options={"a": [1, -2.5, None], \'b\': (True, False)})]',
             {"text": "it's", "options": {"a": [1, -2.5, None], "b": [True, False]}}),
            ("[save(text='''a\n'b' ''', options={'x': {'y': []}},)]",
             {"text": "a\n'b' ", "options": {"x": {"y": []}}}),
            (r"[save(text='\x41\u00e9\U0001f600\n\t\\\'\q', options={})]",
             {"text": "Aé😀\n\t\\'\\q", "options": {}}),
            ("[ save( text = '' , options = { 'a' : 1 , } ) ]", {"text": "", "options": {"a": 1}}),
            ("[save(text='(,)]', options={'n': 1_000, 'm': 1e3, 'k': 007, 'j': .5})]",
             {"text": "(,)]", "options": {"n": 1000, "m": 1000.0, "k": 7, "j": 0.5}}),
            ("[save(text=true, options=null)]", {"text": True, "options": None}),
        ],
    )  # fmt: skip
    def test_literals(self, text: str, arguments: dict[str, Any]) -> None:
        assert calls(PythonicParser, text) == [("save", arguments)]

    def test_several(self) -> None:
        for text in (
            "[now(), get_weather(city='Rome')]",
            "<|python_start|>[now(),get_weather(city='Rome')]<|python_end|>",
        ):
            assert calls(PythonicParser, text) == [("now", {}), ROME]

    @pytest.mark.parametrize(
        "text",
        [
            "[1, 2]", "[now]", "[now(]", "[now(1)]", "[nobody()]", "[]", "now()", "[now()", "[os.system('ls')]",
            "[get_weather('Rome')]", "Look: [now()]", "[(now())]", "[f'{now()}']",
        ],
    )  # fmt: skip
    def test_other_lists_are_content(self, text: str) -> None:
        found = read(PythonicParser, text)
        if text == "[now()":
            assert (found.content, found.loaded) == ("", [("now", {})])
        else:
            assert (found.content, found.calls) == (text, ())

    @pytest.mark.parametrize(
        "value",
        [
            "__import__('os').system('x')", "open('f')", "1 + 1", "lambda: 0", "{1: 2}", "{*[1]}", "b'x'", "f'{x}'",
            "[x for x in y]", "9**9", "nan", "1j", "'open", "(" * 200,
        ],
    )  # fmt: skip
    def test_nothing_but_literals(self, value: str) -> None:
        """What is not a literal breaks the call: it is told as it stands, and never run."""
        text = f"[get_weather(city={value})]"
        found = read(PythonicParser, text)
        assert len(found.calls) == 1
        with pytest.raises(ValueError):
            json.loads(found.calls[0][1])


class TestXml:
    def test_values_are_what_the_schema_says(self) -> None:
        text = (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n42\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            '</function>\n</tool_call>\n<tool_call>\n<function=save>\n<parameter=text>\nline 1\n\nline 3 "x"\n\n'
            '</parameter>\n<parameter=options>\n{"a": [1, true]}\n</parameter>\n<parameter=tags>["x"]</parameter>\n'
            "</function>\n</tool_call>"
        )
        assert calls(XmlParser, text) == [
            ("get_weather", {"city": "42", "days": 3}),
            ("save", {"text": 'line 1\n\nline 3 "x"\n', "options": {"a": [1, True]}, "tags": ["x"]}),
        ]

    def test_what_fits_no_schema_is_what_it_looks_like(self) -> None:
        text = "<function=f><parameter=a>5</parameter><parameter=b>five</parameter><parameter=c>True</parameter>"
        text += "</function>"
        assert read(XmlParser, text, ()).loaded == [("f", {"a": 5, "b": "five", "c": True})]
        schema = {"properties": {"a": {"type": ["string", "null"]}, "b": {"type": ["string", "integer"]}}}
        text = "<function=f><parameter=a>5</parameter><parameter=b>5</parameter></function>"
        assert read(XmlParser, text, [{"name": "f", "parameters": schema}]).loaded == [("f", {"a": "5", "b": 5})]

    @pytest.mark.parametrize(
        "text",
        [
            "<tool_call>x</tool_call>",
            "<function=nobody></function>",
            "<tool_call>\n<function=",
            "<function=now",
            "<function >",
        ],
    )
    def test_what_is_no_call_is_content(self, text: str) -> None:
        found = read(XmlParser, text)
        assert (found.content, found.calls) == (text, ())


class TestDeepSeek:
    def test_both_versions(self) -> None:
        fenced = (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"  # noqa: RUF001
            '{"city": "Rome"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'  # noqa: RUF001
            "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001
        )
        bare = (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'  # noqa: RUF001
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001
        )
        for text in (fenced, bare):
            assert calls(DeepSeekParser, text) == [ROME, ("now", {})]
            assert read(DeepSeekParser, f"I look.\n\n{text}").content == "I look."


TEMPLATES = {
    "harmony": "{{- '<|start|>assistant<|channel|>commentary to=functions.' ~ name ~ ' <|constrain|>json' }}",
    "qwen3_coder": "{% if tools %}<tool_call>\n<function=example_function_name>\n<parameter=a>{% endif %}",
    "deepseek_v3": "{% if tools %}<｜tool▁call▁begin｜>{% endif %}",  # noqa: RUF001
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS] [TOOL_CALLS]",
    "pythonic": "{{ tools }} You SHOULD use [func_name1(params_name1=params_value1, ...)]",
    "llama3_json": '{{ tools }} Respond in the format {"name": function name, "parameters": dictionary ...}',
    "hermes": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "plain": "{{ tools }} in a way that nobody knows",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_auto_goes_by_the_template(name: str) -> None:
    candidates = [one for one in Registry.discover().providers("tool_parser") if one.provider.rank >= 0]
    found = best(candidates, OutputParserContext(TEMPLATES[name], "", ""))
    assert found is not None
    assert {one.name for one in candidates if one.load() is found} == {name}


def test_without_a_template_nothing_is_found() -> None:
    for contract in (TOOL_PARSER, REASONING_PARSER):
        candidates = [one for one in Registry.discover().providers(contract.name) if one.provider.rank >= 0]
        found = best(candidates, OutputParserContext("", "", ""))
        assert found is not None
        assert found.__name__ == "PlainParser"


FORMATS = [
    (HermesParser, ""), (LlamaParser, ""), (MistralParser, ""), (MistralParser, "[ARGS]"), (PythonicParser, ""),
    (XmlParser, ""), (DeepSeekParser, "```json"), (DeepSeekParser, ""),
    (GemmaParser, ""),
]  # fmt: skip

SHAPES: tuple[dict[str, Any], ...] = (
    *TOOLS,  # type: ignore[arg-type]
    {"name": "optional", "parameters": {"properties": {"a": {"type": "boolean"}, "b": {"type": "number"}}}},
    {"name": "a.b-c_9", "parameters": {"type": "object", "properties": {"k": {"enum": ["x", 'y"z', 3, None, True]}},
                                       "required": ["k"]}},
    {"name": "nested", "parameters": {"type": "object", "required": ["p"], "properties": {"p": {"$ref": "#/$defs/p"}},
                                      "$defs": {"p": {"type": "array", "items": {"type": "integer"}}}}},
    {"name": "bare"},
)  # fmt: skip


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GrammarBackend:
    pytest.importorskip(request.param)
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    ctx = GrammarContext(directory, Tokenizer.from_directory(directory), 352, frozenset({2}))
    record = Registry.discover().get("grammar", request.param)
    assert record is not None
    made: GrammarBackend = record.load()(record.options_model()(), ctx)
    return made


def follows(backend: GrammarBackend, grammar: Grammar, text: str) -> bool:
    """Whether a text is one of the grammar's, whole."""
    matcher = backend.load(grammar, backend.compile(grammar)).matcher()
    return all(matcher.accept(one) for one in backend.ctx.tokenizer.encode(text, add_special_tokens=False)) and (
        matcher.accept(2)
    )


@pytest.mark.parametrize(("cls", "template"), FORMATS, ids=lambda one: getattr(one, "__name__", one))
class TestGrammars:
    def test_a_backend_takes_what_is_written(
        self, cls: type[OutputParser], template: str, backend: GrammarBackend
    ) -> None:
        one = parser(cls, template)
        written = one.write_calls([{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}])
        grammar = one.constraint(SHAPES)  # type: ignore[arg-type]
        assert grammar is not None
        assert follows(backend, grammar, written), written
        named = one.constraint(SHAPES, name="get_weather", parallel=False)  # type: ignore[arg-type]
        assert named is not None
        assert follows(backend, named, written)
        for other in ("", "Hi.", "I call " + written, one.write_calls([{"name": "now", "arguments": {}}])):
            assert not follows(backend, named, other), other

    def test_every_shape_can_be_forced_and_is_read(
        self, cls: type[OutputParser], template: str, backend: GrammarBackend
    ) -> None:
        for function in SHAPES:
            if function["name"] == "nested":
                continue  # References are for backends.
            grammar = parser(cls, template).constraint(SHAPES, name=function["name"], parallel=False)  # type: ignore[arg-type]
            assert grammar is not None
            for seed in range(6):
                text = sample(grammar, seed)
                assert follows(backend, grammar, text), text
                found = feed(parser(cls, template).stream(SHAPES), [text])  # type: ignore[arg-type]
                assert [name for name, _ in found.loaded] == [function["name"]]

    def test_references_lead_where_they_did(
        self, cls: type[OutputParser], template: str, backend: GrammarBackend
    ) -> None:
        grammar = parser(cls, template).constraint(SHAPES)  # type: ignore[arg-type]
        assert grammar is not None
        good = parser(cls, template).write_calls([{"name": "nested", "arguments": {"p": [1, 2]}}])
        assert follows(backend, grammar, good)
        if grammar.kind != "ebnf":
            bad = parser(cls, template).write_calls([{"name": "nested", "arguments": {"p": ["x"]}}])
            assert not follows(backend, grammar, bad)

    def test_ids_of_64_bits_are_exact(self, cls: type[OutputParser], template: str, backend: GrammarBackend) -> None:
        large = 2**63 - 1
        properties: dict[str, Any] = {"id": {"type": "integer"}, "to": {"enum": [large, large - 1024]}}
        tools: list[Any] = [{"name": "send", "parameters": {"properties": properties, "required": ["id", "to"]}}]
        grammar = parser(cls, template).constraint(tools)
        assert grammar is not None
        for to, good in ((large, True), (large - 1024, True), (large + 1, False), (large - 1, False)):
            written = parser(cls, template).write_calls([{"name": "send", "arguments": {"id": large, "to": to}}])
            assert follows(backend, grammar, written) == good, written
            assert feed(parser(cls, template).stream(tools), [written]).loaded == [("send", {"id": large, "to": to})]

    def test_calls_that_need_not_be(self, cls: type[OutputParser], template: str, backend: GrammarBackend) -> None:
        strict = [{**TOOLS[0], "strict": True}, TOOLS[1]]
        grammar = parser(cls, template).constraint(strict, required=False)  # type: ignore[arg-type]
        if grammar is None:
            return
        write = parser(cls, template).write_calls
        for text in ("Just text.", f"Look: {write([{'name': 'get_weather', 'arguments': {'city': 'Rome'}}])}"):
            assert follows(backend, grammar, text), text
        assert not follows(backend, grammar, write([{"name": "get_weather", "arguments": {"town": "Rome"}}]))
        assert follows(backend, grammar, write([{"name": "save", "arguments": {"anything": 1}}]))


@pytest.mark.parametrize(("cls", "template"), FORMATS, ids=lambda one: getattr(one, "__name__", one))
def test_little_is_held_back(cls: type[OutputParser], template: str) -> None:
    """What waits to be read again with the next piece is never more than a marker."""
    one = parser(cls, template)
    text = one.write_calls([{"name": "save", "arguments": {"text": "< word [ {" * 50, "options": {"a": [1, "x"]}}}])
    for shape in (text, text[: len(text) // 2] + " " * 2000, "<tool_cal" * 200, "[TOOL_" * 200, "{[(<" * 500):
        stream = one.stream(TOOLS)
        assert isinstance(stream, TextStream)
        for char in shape:
            stream.feed(char)
            assert len(stream.source.text) - stream.source.at <= 32
