"""Answers that are calls or follow a format, on the backends: whatever their masks let through is one or the other."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.conformance.streams import Told, feed, one_by_one
from pegboard.core.interfaces.sampling import Grammar
from pegboard.core.registry.registry import Registry
from pegboard.plugins.grammar.api import GrammarBackend, GrammarContext
from pegboard.plugins.grammar.suite.cases import EOS, WIDTH
from pegboard.plugins.grammar.suite.walks import bytes_of, random_walk
from pegboard.plugins.parsers_tools.json_formats import DeepSeekParser, HermesParser, LlamaParser, MistralParser
from pegboard.plugins.parsers_tools.pythonic import PythonicParser
from pegboard.plugins.parsers_tools.xml_format import XmlParser
from pegboard.toolkit.chat.call_or import CallOrStream
from pegboard.toolkit.chat.tool_calls import Tools
from pegboard.toolkit.chat.tool_schema import Choice
from pegboard.toolkit.parsing.output_parser import OutputParser, OutputParserContext
from pegboard.toolkit.text.tokenizer import Tokenizer

FORMATS = [
    (HermesParser, ""), (LlamaParser, ""), (MistralParser, ""), (MistralParser, "[ARGS]"), (PythonicParser, ""),
    (XmlParser, ""), (DeepSeekParser, "```json"), (DeepSeekParser, ""),
]  # fmt: skip
WEATHER = {
    "type": "object",
    "properties": {"days": {"type": "integer"}, "unit": {"type": "string", "enum": ["C", "F"]}},
    "required": ["days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "now": NOTHING}
ANSWER = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no", "<tool_call>[now()]"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
FORM = Grammar("json_schema", json.dumps(ANSWER))


def tools(*, parallel: bool = True, strict: bool = True, choice: Choice = "auto") -> Tools:
    functions = [{"name": name, "parameters": one, "strict": strict} for name, one in SCHEMAS.items()]
    return Tools(tuple(functions), choice, parallel=parallel)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["llguidance", pytest.param("xgrammar", marks=pytest.mark.full)])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GrammarBackend:
    pytest.importorskip(request.param)
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    ctx = GrammarContext(directory, Tokenizer.from_directory(directory), WIDTH, frozenset({EOS}))
    record = Registry.discover().get("grammar", request.param)
    assert record is not None
    made: GrammarBackend = record.load()(record.options_model()(), ctx)
    return made


def walks(backend: GrammarBackend, grammar: Grammar, count: int) -> list[str]:
    """Texts that came of choosing among the masks' tokens at random, those that ended."""
    compiled = backend.load(grammar, backend.compile(grammar))
    done = (random_walk(compiled, random.Random(seed)) for seed in range(count))
    return [b"".join(map(bytes_of, tokens)).decode(errors="replace") for tokens, ended in done if ended]


def follows(backend: GrammarBackend, grammar: Grammar, text: str) -> bool:
    matcher = backend.load(grammar, backend.compile(grammar)).matcher()
    return all(matcher.accept(one) for one in backend.ctx.tokenizer.encode(text, add_special_tokens=False)) and (
        matcher.accept(EOS)
    )


def check_calls(found: Told, text: str) -> None:
    assert found.content == "", text
    for name, arguments in found.loaded:
        Draft202012Validator(SCHEMAS[name]).validate(arguments)


@pytest.mark.parametrize(("cls", "template"), FORMATS, ids=lambda one: getattr(one, "__name__", one))
class TestEither:
    def made(self, cls: type[OutputParser], template: str) -> OutputParser:
        return cls(None, OutputParserContext(template, "", ""))

    def read(self, parser: OutputParser, openings: Sequence[str], text: str) -> Told:
        functions = tools().functions
        found = feed(CallOrStream(parser.stream(functions), openings), one_by_one(text))
        assert found == feed(CallOrStream(parser.stream(functions), openings), [text])
        return found

    def test_every_answer_is_one_or_the_other(
        self, cls: type[OutputParser], template: str, backend: GrammarBackend
    ) -> None:
        parser = self.made(cls, template)
        either = tools().grammar_or(FORM, parser)
        assert either is not None
        grammar, openings = either
        seen = {"calls": 0, "format": 0}
        for text in walks(backend, grammar, 30):
            found = self.read(parser, openings, text)
            if found.calls:
                check_calls(found, text)
            else:
                assert found.content == text
                Draft202012Validator(ANSWER).validate(json.loads(text))
            seen["calls" if found.calls else "format"] += 1
        assert min(seen.values()) > 0, seen

    def test_what_the_model_would_write_is_allowed(
        self, cls: type[OutputParser], template: str, backend: GrammarBackend
    ) -> None:
        parser = self.made(cls, template)
        one: dict[str, Any] = {"name": "get_weather", "arguments": {"days": 2}}
        other = {"name": "now", "arguments": {}}
        several = cls is not LlamaParser
        for strict in (True, False):
            either = tools(strict=strict).grammar_or(FORM, parser)
            single = tools(strict=strict, parallel=False).grammar_or(FORM, parser)
            assert either is not None
            assert single is not None
            for calls in ([one], [other], [other, one]):
                text = parser.write_calls(calls)  # type: ignore[arg-type]
                assert follows(backend, either[0], text) == (several or len(calls) == 1), text
                assert follows(backend, single[0], text) == (len(calls) == 1), text
                assert not follows(backend, either[0], f"{text}\nThat was it."), text
                assert [name for name, _ in self.read(parser, either[1], text).calls] == [
                    call["name"] for call in calls
                ]
            answer = '{"answer": "<tool_call>[now()]", "sure": true}'
            assert follows(backend, either[0], answer)
            assert self.read(parser, either[1], answer).content == answer
            for bad in ("Hi.", '{"answer": "maybe", "sure": true}', answer + parser.write_calls([one])):  # type: ignore[list-item]
                assert not follows(backend, either[0], bad), bad

    def test_behind_forced_calls_the_answer_ends(
        self, cls: type[OutputParser], template: str, backend: GrammarBackend
    ) -> None:
        parser = self.made(cls, template)
        grammar = tools(choice="required").grammar(parser)
        assert grammar is not None
        texts = walks(backend, grammar, 8)
        assert texts
        for text in texts:
            found = feed(parser.stream(tools().functions), [text])
            assert found.calls, text
            check_calls(found, text)
        written = parser.write_calls([{"name": "get_weather", "arguments": {"days": 2}}])
        assert follows(backend, grammar, written)
        for more in (" ", "\n\n", "\nIt is sunny.", '\n{"answer": "yes", "sure": true}'):
            assert not follows(backend, grammar, written + more), more


def test_json_that_looks_like_a_call_at_first(backend: GrammarBackend) -> None:
    """Where a format begins as calls do, the whole answer says which of them it is."""
    parser = LlamaParser(None, OutputParserContext("", "", ""))  # type: ignore[arg-type]
    form = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}, "more": {"type": "integer"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    either = tools().grammar_or(Grammar("json_schema", json.dumps(form)), parser)
    assert either is not None
    grammar, openings = either
    call = '{"name": "get_weather", "parameters": {"days": 3}}'
    others = (
        '{"name": "get_weather", "parameters": {"days": 3}, "more": 1}', '{"name": "get_weather", "more": 1}',
        '{"name": "get", "parameters": {"days": 3}}', '{"name": "get_weather"}',
    )  # fmt: skip
    for text in (call, *others):
        assert follows(backend, grammar, text), text
        for pieces in ([text], one_by_one(text)):
            found = feed(CallOrStream(parser.stream(tools().functions), openings), pieces)
            assert found.loaded == ([("get_weather", {"days": 3})] if text == call else []), text
            assert found.content == ("" if text == call else text)
