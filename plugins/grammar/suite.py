"""The conformance suite of GrammarBackend."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.conformance.suite import ContractSuite, capability
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar, GrammarKind
from pegboard.plugins.grammar.api import CompiledGrammar, GrammarBackend, GrammarContext, GrammarMatcher
from pegboard.toolkit.grammars.grammar import any_of, parts_of
from pegboard.toolkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

WIDTH = 352
"""Of the logits: more than the tokenizer's 320 tokens, as with models whose vocabulary is padded."""

EOS = 2
SPECIAL = (0, 1)
LETTER = 68
"""The token `a`."""

GARBAGE = 0x5A5A5A5A
"""What stands in a mask before it is filled."""

PATIENCE = 400
"""Most tokens of a random walk."""

KINDS: tuple[GrammarKind, ...] = ("json_schema", "json_object", "regex", "ebnf", "structural_tag", "any_of")


@dataclass(frozen=True)
class Case:
    """A grammar with texts that follow it and texts that do not, as a whole or as beginnings."""

    grammar: Grammar
    good: Sequence[str]
    bad: Sequence[str]

    def __str__(self) -> str:
        return f"{self.grammar.kind}: {self.grammar.source[:60]}"


def schema(value: object) -> Grammar:
    return Grammar("json_schema", value if isinstance(value, str) else json.dumps(value))


_TAG: dict[str, object] = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=bc>", "schema": {"enum": ["x", "y"]}, "end": "!"},
    ],
    "triggers": ["<f="],
}


def tag(**flags: bool) -> Grammar:
    return Grammar("structural_tag", json.dumps({**_TAG, **flags}))


_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def alone(**more: object) -> Grammar:
    """Return the same structures, and nothing else but what is between and around them."""
    parts = {"structures": _TAG["structures"], "separator": ", ", **more}
    return Grammar("structural_tag", json.dumps(parts))


SCHEMAS = (
    Case(schema({"type": "integer"}), ["0", "17", "-3"], ["", "a", "1.5", '"1"', "01", "[1]"]),
    Case(schema({"type": "boolean"}), ["true", "false"], ["True", "null", "1"]),
    Case(schema({"enum": ["red", "green", 3, None]}), ['"red"', '"green"', "3", "null"], ['"blue"', "red", "4"]),
    Case(schema({"const": {"a": [1, "b"]}}), [], ["{}", '{"a": [2, "b"]}', "[1]"]),
    Case(schema({"type": ["integer", "null"]}), ["4", "null"], ['"a"', "[]", "true"]),
    Case(schema({"type": "integer", "minimum": 3, "maximum": 20}), ["3", "11", "20"], ["2", "21", "-3", "200"]),
    Case(schema({"type": "string", "minLength": 2, "maxLength": 3}), ['"ab"', '"é€b"'], ['"a"', '"abcd"', "ab"]),
    Case(schema({"type": "string", "pattern": "^[a-c]+-[0-9]{2}$"}), ['"abc-01"'], ['"-01"', '"d-01"', '"a-1"']),
    Case(
        schema({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}),
        ["[1]", "[1, 2]"],
        ["[]", "[1, 2, 3]", '["a"]', "[1,]"],
    ),
    Case(
        schema({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}),
        ['[1, "a"]'],
        ['["a", 1]', '[1, "a", 2]'],
    ),
    Case(
        schema(_PERSON),
        ['{"name": "Ann", "age": 7}', '{"name": "a\\"bü", "age": 7}'],
        ["{}", '{"name": "Ann"}', '{"name": 1, "age": 7}', '{"name": "Ann", "age": 7, "x": 1}', "[]"],
    ),
    Case(
        schema({"type": "object", "additionalProperties": {"type": "boolean"}}),
        ["{}", '{"a": true, "b": false}'],
        ['{"a": 1}', "{a: true}"],
    ),
    Case(schema(_TREE), ['{"v": 1, "next": {"v": 2, "next": null}}'], ['{"v": 1}', '{"v": 1, "next": {}}']),
    Case(
        schema({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "null"}}]}),
        ["3", "[null, null]", "[]"],
        ["null", "[1]"],
    ),
    Case(
        schema({"type": "string", "pattern": "^1([.][0-9]+)?(Z|[+])?$"}), ['"1.25"', '"1Z"'], ['"12"', '"12Z"', '"1."']
    ),
    Case(schema({"type": "string", "pattern": "^[^\\s,]{1,3}$"}), ['"a-b"', '"x"'], ['"""', '"a b"', '"\\"', '"a,b"']),
    Case(
        schema({"type": "string", "format": "time"}),
        ['"10:20:30Z"', '"10:20:30.5+01:00"'],
        ['"10:20:303Z"', '"24:00:00Z"'],
    ),
    Case(schema({"type": "string", "format": "date"}), ['"2024-02-29"'], ['"2024-13-01"', '"2023-02-29"', '"today"']),
    Case(schema({"type": "string", "format": "uuid"}), ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    Case(schema({"type": "string", "format": "of-our-own"}), ['"x"'], ["x"]),
    Case(schema("true"), ["1", '"a"', '{"a": [null]}'], ["a", "{", "[1,]"]),
    Case(schema({}), ["1", '"a"', '{"a": [null]}'], ["a", "{", "[1,]"]),
)

_BIG = 2**60 + 1
"""An integer that is not a double: the nearest double is one less."""

_IDS = {
    "type": "object",
    "properties": {"ids": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/id"}, {"type": "null"}]}}},
    "required": ["ids"],
    "additionalProperties": False,
    "$defs": {"id": {"type": "integer", "enum": [_BIG, 7]}},
}

LARGE = (
    Case(schema({"const": _BIG}), [str(_BIG)], [str(_BIG - 1), f"-{_BIG}"]),
    Case(schema({"enum": [-_BIG, "a", 2**80 + 1]}), [str(-_BIG), str(2**80 + 1), '"a"'], [str(1 - _BIG), str(2**80)]),
    Case(
        schema({"type": "integer", "minimum": _BIG, "exclusiveMaximum": _BIG + 10}),
        [str(_BIG), str(_BIG + 9)],
        [str(_BIG - 1), str(_BIG + 10), "5"],
    ),
    Case(
        schema({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}),
        [str(-(2**63)), str(2**63 - 1), "0", "-7"],
        [str(-(2**63) - 1), str(2**63), "0.5"],
    ),
    Case(schema({"type": "integer", "maximum": 2**64 - 1}), [str(2**64 - 1), "-1"], [str(2**64)]),
    Case(
        schema({"type": "number", "maximum": _BIG}),
        [str(_BIG), "-0.5", str(_BIG - 1) + ".5"],
        [str(_BIG + 1), f"{_BIG}.5"],
    ),
    Case(schema({"type": "integer", "multipleOf": 10**17}), ["0", str(3 * 10**17)], ["1", str(10**17 + 1)]),
    Case(
        schema(_IDS),
        [f'{{"ids": [7, {_BIG}, null]}}', '{"ids": []}'],
        [f'{{"ids": [{_BIG - 1}]}}', '{"ids": [8]}', "{}"],
    ),
    Case(
        Grammar(
            "structural_tag",
            json.dumps({"structures": [{"begin": "<", "schema": {"const": _BIG}, "end": ">"}], "triggers": ["<"]}),
        ),
        [f"a <{_BIG}> b"],
        [f"<{_BIG - 1}>"],
    ),
)
"""Integers that doubles do not tell from their neighbours, where a backend may refuse a whole grammar."""

OBJECTS = (
    Case(Grammar("json_object"), ["{}", '{"a": [1, {"b": "c"}], "d": null}'], ["[]", "1", "{a: 1}", '{"a"}', ""]),
)

REGEXES = (
    Case(Grammar("regex", "[a-c]+x?"), ["a", "abcx", "cc"], ["", "x", "axx", "ad"]),
    Case(Grammar("regex", "[a-z]+z"), ["az", "zzz"], ["a", "z", "azb"]),
    Case(Grammar("regex", "(ab|a)(bc|c)"), ["abbc", "abc", "ac"], ["a", "abb", "abcc"]),
    Case(Grammar("regex", "\\d{3}-\\w+\\.(é|€)"), ["123-ab_1.é", "000-x.€"], ["12-a.é", "123-a.x"]),
    Case(Grammar("regex", "^(yes|no)$"), ["yes", "no"], ["maybe", "yess"]),
    Case(Grammar("regex", "a*"), ["", "aaa"], ["b"]),
)

EBNF = (
    Case(Grammar("ebnf", 'root ::= "yes" | "no" ("," [a-z]{1,3})?'), ["yes", "no", "no,abc"], ["y", "no,", "no,abcd"]),
    Case(Grammar("ebnf", 'root ::= "a" | "(" root ")"'), ["a", "(a)", "(((a)))"], ["", "(a", "(a))", "()"]),
    Case(Grammar("ebnf", 'root ::= [a-z]+ "x"'), ["ax", "axx"], ["x", "a", "axb"]),
    Case(
        Grammar("ebnf", 'root ::= "(" root ")" | word "c"\nword ::= "a" | "ab" "b"*'), ["(ac)", "abbc"], ["(a)", "bc"]
    ),
    Case(Grammar("ebnf", 'root ::= root "+" [0-9] | [0-9]'), ["1", "1+2+3"], ["+1", "1+", "12"]),
    Case(
        Grammar("ebnf", 'root ::= pair (", " pair)*  # pairs\npair ::= key\n  "=" [^,=]+\nkey ::= [A-Za-z_-]+'),
        ["a=1", "a=1, b-c=ü d"],
        ["a", "a=", "a=1,b=2", "1=a"],
    ),
    Case(
        Grammar("ebnf", 'root ::= "\\"" [^"\\\\\\n]* "\\"" "\\u00e9"? "\\x41" .?'), ['"a b"A', '""éA!'], ['"A', '"a"']
    ),
    Case(Grammar("ebnf", 'root ::= ""'), [""], ["a"]),
)

TAGS = (
    Case(tag(), ["", "hi", 'a <f=a>12</f> b <f=bc>"x"! c', "a < b <f"], ["<f=d", "<f=a>x", "<f=a>1</g>", "<f="]),
    Case(tag(at_least_one=True), ["<f=a>1</f>", '<f=a>1</f> and <f=bc>"y"!.'], ["", "hi", "hi <f=a>1</f>", "<f=a>1"]),
    Case(tag(stop_after_first=True), ["", "hi <f=a>1</f>"], ["<f=a>1</f> b", "<f=a>1</f><f=a>1</f>"]),
    Case(tag(at_least_one=True, stop_after_first=True), ['<f=bc>"x"!'], ["", "hi", '<f=bc>"x"! ']),
    Case(
        alone(at_least_one=True),
        ["<f=a>1</f>", '<f=a>1</f>, <f=bc>"y"!, <f=a>2</f>'],
        ["", "hi", "<f=a>1</f> ", "<f=a>1</f>, ", "<f=a>1</f><f=a>1</f>", "<f=a>1</f>, hi", ", <f=a>1</f>"],
    ),
    Case(
        alone(at_least_one=True, stop_after_first=True, begin="[", end="]!"),
        ["[<f=a>1</f>]!", '[<f=bc>"x"!]!'],
        ["", "[]!", "<f=a>1</f>", "[<f=a>1</f>", "[<f=a>1</f>, <f=a>1</f>]!", "[<f=a>1</f>]! ", "[<f=a>1</f>]"],
    ),
    Case(
        alone(at_least_one=True, trailing_separator=True, end="."),
        ["<f=a>1</f>.", "<f=a>1</f>, .", "<f=a>1</f>, <f=a>2</f>, ."],
        ["", ", ", "<f=a>1</f>, , .", "<f=a>1</f>,.", "<f=a>1</f>, x"],
    ),
    Case(
        alone(trailing_separator=True),
        ["", "<f=a>1</f>", "<f=a>1</f>, "],
        [", ", "<f=a>1</f>, , "],
    ),
    Case(alone(separator="", begin="<", end=">"), ["<>", "<<f=a>1</f><f=a>2</f>>"], ["", "<", "<<f=a>1</f>, >"]),
)

_CALL = {
    "type": "object",
    "properties": {"name": {"const": "get"}, "parameters": {"type": "object"}},
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
UNIONS = (
    Case(
        any_of(alone(at_least_one=True), schema(_PERSON)),
        ["<f=a>1</f>", '<f=a>1</f>, <f=bc>"x"!', '{"name": "Ann", "age": 7}'],
        ["", "hi", '<f=a>1</f>{"name": "Ann", "age": 7}', '{"name": "Ann"}', '{"name": "Ann", "age": 7}<f=a>1</f>'],
    ),
    # Both begin alike, and part where a value does.
    Case(
        any_of(schema(_CALL), schema(_PERSON)),
        ['{"name": "get", "parameters": {"a": 1}}', '{"name": "get", "age": 7}', '{"name": "ge", "age": 7}'],
        ['{"name": "ge", "parameters": {}}', '{"name": "get", "parameters": {}, "age": 7}'],
    ),
    Case(
        any_of(EBNF[3].grammar, Grammar("json_object"), Grammar("regex", "[0-9]+")),
        ["(ac)", "abbc", '{"a": [1]}', "12"],
        ["(12)", "", "[1]", "12a"],
    ),
)

ALL = {
    "json_schema": SCHEMAS, "json_object": OBJECTS, "regex": REGEXES, "ebnf": EBNF, "structural_tag": TAGS,
    "any_of": UNIONS,
}  # fmt: skip

_DEEP = '{"items":' * 2000 + "true" + "}" * 2000

INVALID: dict[str, Sequence[str]] = {
    "json_schema": (
        "nonsense", "", "[1]", "7", "false", '{"type": "nonsense"}', '{"type": "string", "pattern": "("}',
        '{"enum": []}', '{"type": "integer", "minimum": 5, "maximum": 3}', '{"$ref": "#/$defs/missing"}',
        '{"$ref": "https://example.com/schema.json"}', '{"$ref": "file:///etc/passwd"}', '{"$ref": "#"}',
        '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}',
        '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}', _DEEP,
        '{"type": "array", "uniqueItems": true}', '{"not": {"type": "integer"}}',
        '{"oneOf": [{"type": "integer"}, {"type": "number"}]}',
    ),
    "regex": ("(", "[z-a]", "*a", "a{2,1}", "(?=a)b", "a(?!b)c", "(?<=a)b"),
    "ebnf": (
        "", "nonsense", 'start ::= "a"', 'root ::= "a', "root ::= missing", 'root ::= "a" root', "root ::= [z-a]",
        'root ::= "a" | ) "b"', "root ::= (" * 500, 'root ::= "a"\nroot ::= "b"',
        'root ::= a\na ::= b\nb ::= "(" a ")"',
    ),
    "any_of": ("nonsense", "[]", "{}", '[{"kind": "any_of", "source": "[]"}]', '[{"kind": "json_schema"}]',
    ),
    "structural_tag": (
        "nonsense", "[]", json.dumps({**_TAG, "structures": [{"begin": "<f=", "end": "", "schema": {"type": "x"}}]}),
    ),
}  # fmt: skip
"""What is not a grammar, or one whose texts never end, or one that is not going to be enforced."""


class GrammarContract(ContractSuite):
    """A backend takes what a grammar allows and nothing else, and says so before and after.

    Kinds of grammars are capabilities, and so are rollback and forced tokens. The tokenizer has every byte as a token
    of its own, some longer ones, and special ones.
    """

    contract = "grammar"

    @pytest.fixture
    def ctx(self, tmp_path: Path) -> GrammarContext:
        write_tiny_tokenizer(tmp_path)
        return GrammarContext(tmp_path, Tokenizer.from_directory(tmp_path), WIDTH, frozenset({EOS}))

    @pytest.fixture
    def backend(self, ctx: GrammarContext) -> GrammarBackend:
        made: GrammarBackend = self.build(ctx)
        return made

    # What the tests share.

    def compiled(self, backend: GrammarBackend, grammar: Grammar) -> CompiledGrammar:
        data = backend.compile(grammar)
        assert isinstance(data, bytes), "it travels between processes"
        return backend.load(grammar, data)

    def cases(self) -> Iterator[Case]:
        for kind in KINDS:
            if kind in self.capabilities:
                yield from ALL[kind]

    def skip_without(self, kinds: set[str]) -> None:
        if lacking := sorted(kinds - self.capabilities):
            pytest.skip(f"it does not declare {', '.join(lacking)}")

    def check(self, backend: GrammarBackend, case: Case) -> None:
        compiled = self.compiled(backend, case.grammar)
        for text in case.good:
            assert self.spelled(compiled, text) is not None, f"{case}: {text!r} follows it, but no tokens spell it"
        for text in case.bad:
            assert self.spelled(compiled, text) is None, f"{case}: {text!r} does not follow it, but is taken"

    def spelled(self, compiled: CompiledGrammar, text: str) -> list[int] | None:
        """Return tokens that spell a text, each in the mask after those before it, and the end after them all. None
        where there are none, however the text is cut.
        """
        return _spelling(compiled, text.encode(), [])

    def path(self, compiled: CompiledGrammar, case: Case, text: str) -> list[int]:
        """Return tokens that spell a good text."""
        found = self.spelled(compiled, text)
        assert found is not None, f"{case}: {text!r} follows it, but no tokens spell it"
        return found

    # The tests.

    @capability("json_schema")
    @pytest.mark.parametrize("case", SCHEMAS, ids=str)
    def test_json_schema(self, backend: GrammarBackend, case: Case) -> None:
        self.check(backend, case)

    @capability("json_schema")
    @pytest.mark.parametrize("case", LARGE, ids=str)
    def test_large_integers_are_exact_or_refused(self, backend: GrammarBackend, case: Case) -> None:
        self.skip_without({case.grammar.kind})
        try:
            backend.compile(case.grammar)
        except InvalidRequest as error:
            named = error.param
        else:
            self.check(backend, case)
            return
        assert named == case.grammar.kind, f"{case}: the refusal names {named!r}"

    @capability("json_object")
    @pytest.mark.parametrize("case", OBJECTS, ids=str)
    def test_json_object(self, backend: GrammarBackend, case: Case) -> None:
        self.check(backend, case)

    @capability("regex")
    @pytest.mark.parametrize("case", REGEXES, ids=str)
    def test_regex(self, backend: GrammarBackend, case: Case) -> None:
        self.check(backend, case)

    @capability("ebnf")
    @pytest.mark.parametrize("case", EBNF, ids=str)
    def test_ebnf(self, backend: GrammarBackend, case: Case) -> None:
        self.check(backend, case)

    @capability("any_of")
    @pytest.mark.parametrize("case", UNIONS, ids=str)
    def test_any_of(self, backend: GrammarBackend, case: Case) -> None:
        self.skip_without({one.kind for one in parts_of(case.grammar)})
        self.check(backend, case)

    @capability("any_of")
    def test_what_is_wrong_with_a_part_is_said_of_that_part(self, backend: GrammarBackend) -> None:
        self.skip_without({"json_object", "json_schema"})
        for source in INVALID["json_schema"]:
            with pytest.raises(InvalidRequest) as error:
                self.compiled(backend, any_of(Grammar("json_object"), schema(source)))
            assert str(error.value.param).partition(".")[0] == "json_schema", source[:100]

    @capability("structural_tag")
    @pytest.mark.parametrize("case", TAGS, ids=str)
    def test_structural_tag(self, backend: GrammarBackend, case: Case) -> None:
        self.check(backend, case)

    def test_what_is_no_grammar_is_refused_by_its_name(self, backend: GrammarBackend) -> None:
        for kind in KINDS:
            for source in INVALID.get(kind, ()):
                with pytest.raises(InvalidRequest) as error:
                    self.compiled(backend, Grammar(kind, source))
                assert error.value.status == 400, source[:100]
                assert str(error.value.param).partition(".")[0] == kind, source[:100]
                assert len(error.value.message) < 2000, "an error is for people"

    def test_a_kind_that_is_not_declared_is_refused(self, backend: GrammarBackend) -> None:
        for kind in KINDS:
            if kind not in self.capabilities:
                with pytest.raises(InvalidRequest):
                    backend.compile(ALL[kind][0].grammar)

    def test_fill_and_accept_agree(self, backend: GrammarBackend) -> None:
        """At the beginning, and after each fourth token of a text: each token that is named is accepted, the end is
        where it may be, and no other is accepted but tokens whose text others spell.
        """
        tokenizer = backend.ctx.tokenizer
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            for text in case.good[-1:]:
                path = self.path(compiled, case, text)
                for at in sorted({0, *range(1, len(path), 4), len(path)}):
                    allowed = bits(compiled, path[:at])
                    where = f"{case} after {path[:at]} on the way to {text!r}"
                    asked = {*np.flatnonzero(allowed)[:24].tolist(), *range(at % 5, WIDTH, 5), EOS, *SPECIAL, WIDTH - 1}
                    for token in sorted(asked):
                        accepted = walked(compiled, path[:at]).accept(token)
                        if allowed[token]:
                            assert accepted, f"{where}: token {token} is in the mask, but not accepted"
                        elif not _spelled_otherwise(token, allowed):
                            assert not accepted, f"{where}: token {token} is accepted, but not in the mask"
                    assert not allowed[[*SPECIAL, *range(tokenizer.vocab_size, WIDTH)]].any(), where

    def test_a_row_is_filled_whole_and_no_other_is_touched(self, backend: GrammarBackend) -> None:
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            mask = np.full((3, WIDTH // 32), GARBAGE, np.int32)
            clean = np.zeros((1, WIDTH // 32), np.int32)
            filled = compiled.matcher().fill(mask, 1)
            assert compiled.matcher().fill(clean, 0) == filled
            if filled:
                assert (mask[1] == clean[0]).all(), f"{case}: it depends on what was in the mask"
            assert (mask[[0, 2]] == GARBAGE).all(), f"{case}: another row has changed"

    def test_filling_changes_nothing(self, backend: GrammarBackend) -> None:
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            for text in case.good[-1:]:
                matcher = compiled.matcher()
                for token in self.path(compiled, case, text):
                    first, second = row_of(matcher), row_of(matcher)
                    assert (first == second).all()
                    assert matcher.accept(token), f"{case}: {text!r}"

    def test_a_refused_token_changes_nothing(self, backend: GrammarBackend) -> None:
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            for text in case.good[-1:]:
                matcher = compiled.matcher()
                for token in self.path(compiled, case, text):
                    before = row_of(matcher)
                    for wrong in {*np.flatnonzero(~before)[::37].tolist(), *SPECIAL, WIDTH - 1}:
                        if not _spelled_otherwise(wrong, before):
                            assert not matcher.accept(wrong), f"{case}: {wrong} is accepted, but not in the mask"
                    assert (row_of(matcher) == before).all(), f"{case}: a refused token has left something behind"
                    assert matcher.accept(token), f"{case}: {text!r}"

    def test_an_output_that_is_complete_is_terminated(self, backend: GrammarBackend) -> None:
        """Where nothing can follow but the end, and not before."""
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            for text in case.good:
                matcher = compiled.matcher()
                for token in self.path(compiled, case, text):
                    assert not matcher.terminated, f"{case}: {text!r} is not complete yet"
                    assert matcher.accept(token)
                allowed = np.flatnonzero(row_of(matcher)).tolist()
                assert EOS in allowed, f"{case}: {text!r} may end here"
                assert matcher.terminated == (allowed == [EOS]), f"{case}: after {text!r} come {allowed[:9]}"
                assert matcher.accept(EOS)
                assert matcher.terminated, f"{case}: it has ended"
                assert not row_of(matcher).any(), f"{case}: something comes after the end"
                assert not matcher.accept(EOS)
                assert not matcher.accept(LETTER)

    @capability("rollback")
    def test_rollback(self, backend: GrammarBackend) -> None:
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            for text in case.good:
                tokens = [*self.path(compiled, case, text), EOS]
                matcher = compiled.matcher()
                rows = []
                for token in tokens:
                    rows.append(row_of(matcher))
                    assert matcher.accept(token)
                matcher.rollback(0)
                assert matcher.terminated
                at = len(tokens)
                for count in (1, 2, 1, len(tokens)):
                    back = min(count, at)
                    matcher.rollback(back)
                    at -= back
                    assert (row_of(matcher) == rows[at]).all(), f"{case}: {text!r}, {back} back to {at}"
                for token in tokens[at:]:
                    assert matcher.accept(token), f"{case}: forward again, {text!r}"
                assert matcher.terminated

    @capability("jump_ahead")
    def test_forced_tokens_are_the_only_way_on(self, backend: GrammarBackend) -> None:
        """All of them are accepted, one after the other; every text that may still come begins with theirs."""
        found = 0
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            for text in case.good:
                matcher = compiled.matcher()
                path = self.path(compiled, case, text)
                for at, token in enumerate(path):
                    before = row_of(matcher)
                    forced = list(matcher.forced())
                    assert (row_of(matcher) == before).all(), f"{case}: asking for forced tokens has changed something"
                    self._check_forced(compiled, path[:at], forced, case)
                    found += len(forced)
                    assert matcher.accept(token)
        if any(kind in self.capabilities for kind in ("regex", "ebnf", "json_schema")):
            assert found, "it declares jump_ahead, but has never named a token"

    def _check_forced(self, compiled: CompiledGrammar, path: list[int], forced: list[int], case: Case) -> None:
        matcher = walked(compiled, path)
        rest = b"".join(map(bytes_of, forced))
        for token in forced:
            for other in np.flatnonzero(row_of(matcher)).tolist():
                spelled = b"" if other == EOS else bytes_of(other)
                same = spelled and (rest.startswith(spelled) or spelled.startswith(rest))
                assert same, f"{case}: {rest!r} is said to be forced after {path}, but {spelled!r} may come as well"
            assert matcher.accept(token), f"{case}: {token} is said to be forced after {path}"
            rest = rest[len(bytes_of(token)) :]

    def test_matchers_of_one_grammar_are_independent(self, backend: GrammarBackend) -> None:
        for case in self.cases():
            compiled = self.compiled(backend, case.grammar)
            texts = [self.path(compiled, case, text) for text in case.good for _ in range(2)]
            matchers = [compiled.matcher() for _ in texts]
            fresh = row_of(compiled.matcher())
            for step in range(max(map(len, texts), default=0)):
                for matcher, tokens in zip(matchers, texts, strict=True):
                    if step < len(tokens):
                        assert matcher.accept(tokens[step]), f"{case}: one output disturbs another"
            assert (row_of(compiled.matcher()) == fresh).all(), f"{case}: a new matcher is not at the beginning"

    def test_matchers_work_in_several_threads(self, backend: GrammarBackend) -> None:
        cases = list(self.cases())
        compiled = [self.compiled(backend, case.grammar) for case in cases]

        paths = [
            self.path(one, case, case.good[0]) if case.good else [] for one, case in zip(compiled, cases, strict=True)
        ]

        def run(index: int) -> list[bytes]:
            matcher, rows = compiled[index].matcher(), []
            for token in paths[index]:
                rows.append(row_of(matcher).tobytes())
                matcher.accept(token)
            return rows

        alone = [run(index) for index in range(len(cases))]
        with ThreadPoolExecutor(4) as threads:
            for _ in range(3):
                assert list(threads.map(run, range(len(cases)))) == alone

    def test_what_one_instance_compiles_another_loads(self, backend: GrammarBackend, ctx: GrammarContext) -> None:
        other: GrammarBackend = self.build(ctx)
        for case in self.cases():
            compiled = other.load(case.grammar, bytes(bytearray(backend.compile(case.grammar))))
            for text in case.good:
                self.path(compiled, case, text)

    def test_its_size_is_known(self, backend: GrammarBackend) -> None:
        for case in self.cases():
            assert self.compiled(backend, case.grammar).size_bytes > 0

    def test_whoever_stays_within_the_mask_gets_on(self, backend: GrammarBackend) -> None:
        """Random walks through the masks never get stuck."""
        for number, case in enumerate(self.cases()):
            compiled = self.compiled(backend, case.grammar)
            for seed in range(3):
                random_walk(compiled, random.Random(1000 * number + seed))

    @capability("json_schema")
    def test_a_random_answer_is_json(self, backend: GrammarBackend) -> None:
        person = self.compiled(backend, schema(_PERSON))
        ended = 0
        for seed in range(12):
            tokens, done = random_walk(person, random.Random(seed))
            if done:
                ended += 1
                spelled = b"".join(map(bytes_of, tokens))
                value = json.loads(spelled)
                assert list(value) == ["name", "age"], spelled
                assert isinstance(value["name"], str), spelled
                assert isinstance(value["age"], int), spelled
        assert ended > 3, "random answers hardly ever end"


# ---- helpers -----------------------------------------------------------------------------------------------------


def row_of(matcher: GrammarMatcher) -> NDArray[np.bool_]:
    """Return which tokens may come next, bool [WIDTH]."""
    mask = np.full((1, WIDTH // 32), GARBAGE, np.int32)
    if not matcher.fill(mask, 0):
        return np.ones(WIDTH, np.bool_)
    return np.unpackbits(mask[0].view(np.uint8), bitorder="little").astype(np.bool_)


def walked(compiled: CompiledGrammar, path: Sequence[int]) -> GrammarMatcher:
    """Return a new matcher after these tokens."""
    matcher = compiled.matcher()
    for token in path:
        assert matcher.accept(token), f"token {token} is not accepted on the way {list(path)}"
    return matcher


def bits(compiled: CompiledGrammar, path: Sequence[int]) -> NDArray[np.bool_]:
    return row_of(walked(compiled, path))


def random_walk(compiled: CompiledGrammar, rng: random.Random) -> tuple[list[int], bool]:
    """Return tokens chosen at random among those that the masks name, and whether the end was reached."""
    matcher = compiled.matcher()
    tokens: list[int] = []
    while len(tokens) < PATIENCE:
        allowed = np.flatnonzero(row_of(matcher)).tolist()
        assert allowed, f"nothing may follow {tokens}, not even the end"
        # What closes something is preferred now and then, or strings would go on for ever.
        token = EOS if EOS in allowed and rng.random() < 0.5 else rng.choice(allowed)
        closing = [one for one in allowed if bytes_of(one) in _CLOSING]
        if closing and rng.random() < 0.3:
            token = rng.choice(closing)
        assert matcher.accept(token), f"token {token} is in the mask after {tokens}, but not accepted"
        if token == EOS:
            return tokens, True
        tokens.append(token)
    return tokens, False


def _spelling(compiled: CompiledGrammar, rest: bytes, path: list[int]) -> list[int] | None:
    """Return the way from `path` through the masks to the end of `rest`, the longest tokens first."""
    allowed = np.flatnonzero(bits(compiled, path)).tolist()
    if not rest:
        return path if EOS in allowed else None
    fitting = [token for token in allowed if token > EOS and rest.startswith(bytes_of(token))]
    for token in sorted(fitting, key=lambda one: -len(bytes_of(one))):
        found = _spelling(compiled, rest[len(bytes_of(token)) :], [*path, token])
        if found is not None:
            return found
    return None


@lru_cache
def _vocabulary() -> dict[int, bytes]:
    """Return the bytes of each token of the tiny tokenizer."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_tokenizer(Path(directory))
        tokenizer = Tokenizer.from_directory(directory)
    spelled = {char: byte for byte, char in enumerate(_byte_alphabet())}
    return {
        token: bytes(spelled[char] for char in tokenizer.id_to_token(token) or "")
        for token in range(EOS + 1, tokenizer.vocab_size)
    }


def bytes_of(token: int) -> bytes:
    """Return what a token spells; nothing for one that is special or beyond the vocabulary."""
    return _vocabulary().get(token, b"")


def _spelled_otherwise(token: int, allowed: NDArray[np.bool_]) -> bool:
    """Return whether tokens that may come next begin the text of this one, or have it as their beginning."""
    text = bytes_of(token)
    others = [bytes_of(one) for one in np.flatnonzero(allowed).tolist() if one > EOS]
    return bool(text) and any(text.startswith(one) or one.startswith(text) for one in others)


def _byte_alphabet() -> list[str]:
    """Return how byte-level vocabularies spell the bytes 0 to 255."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    spelled = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]


_CLOSING = frozenset({b'"', b"]", b"}", b">"})
