"""Integers beyond 2**53 in schemas: the rules that are written for them mean what the library's own do."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar.api import GrammarBackend, GrammarContext
from pegboard.plugins.grammar.suite.cases import EOS, WIDTH
from pegboard.plugins.grammar.suite.walks import bytes_of
from pegboard.plugins.grammar_llguidance.backend import LLGuidanceBackend
from pegboard.plugins.grammar_llguidance.options import LLGuidanceOptions
from pegboard.plugins.grammar_llguidance.ranges import Bounds, integers, numbers
from pegboard.toolkit.text.tokenizer import Tokenizer

N, SMALL = 2**60 + 1, 41
"""An integer that is not a double, and one that stands in its place where the library may count."""

LETTERS = {bytes_of(token): token for token in range(EOS + 1, 320) if len(bytes_of(token)) == 1}


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> GrammarBackend:
    directory: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(directory)
    ctx = GrammarContext(directory, Tokenizer.from_directory(directory), WIDTH, frozenset({EOS}))
    return LLGuidanceBackend(LLGuidanceOptions(), ctx)


def compiled(backend: GrammarBackend, schema: Any) -> Any:
    grammar = Grammar("json_schema", json.dumps(schema))
    return backend.load(grammar, backend.compile(grammar))


def takes(grammar: Any, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.accept(LETTERS[bytes([byte])]) for byte in text.encode()) and bool(matcher.accept(EOS))


def put(value: Any, number: int) -> Any:
    """The value with this number for each `SMALL`."""
    return json.loads(json.dumps(value).replace(str(SMALL), str(number)))


_ID = {"type": "integer", "minimum": SMALL}
_OPEN = {"type": "object", "properties": {"a": _ID, "b": {"type": "string"}, 'ü"': {"type": "null"}}}
SCHEMAS: dict[str, Any] = {
    "open": _OPEN,
    "required": {**_OPEN, "required": ["b", "z"]},
    "closed": {**_OPEN, "required": ["a"], "additionalProperties": False},
    "typed rest": {"type": "object", "additionalProperties": _ID, "properties": {"b": True}},
    "list": {"type": "array", "items": _ID},
    "counted": {"type": "array", "items": _ID, "minItems": 2, "maxItems": 3},
    "no more": {"type": "array", "prefixItems": [_ID, {"type": "string"}], "items": False},
    "first": {"type": "array", "prefixItems": [_ID, {"type": "string"}], "minItems": 1, "maxItems": 3},
    "no item": {"type": "array", "items": _ID, "maxItems": 0},
    "types": {"type": ["array", "integer", "string", "null"], "items": _ID, "minimum": SMALL, "pattern": "^x"},
    "any type": {"minimum": SMALL, "items": _ID},
    "constant": {"const": {"a": [SMALL, {}], "b": "x"}},
    "values": {"enum": [SMALL, "x", [SMALL], 7, None], "type": ["integer", "array", "null"]},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "a": {"const": SMALL},
                    "c": {"anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/x"}]},
                },
                "required": ["a"],
                "additionalProperties": {"$ref": "#/$defs/x"},
            },
            "x": {"type": "array", "items": {"$ref": "#/$defs/y~1"}},
            "y/": {"type": ["string", "null"]},
        },
    },
    "one of": {"oneOf": [{"const": SMALL}, {"type": "string"}, {"type": "array", "items": {"allOf": [_ID]}}]},
}  # fmt: skip
TEXTS = (
    "41", "40", "42", "7", "null", '"x"', '"y"', "[]", "[41]", "[40]", "[41, 42]", "[41,42,43]", "[41, 42, 43, 44]",
    '[41, "x"]', '[41, "x", 1]', '[41, "x", 1, 1]', "[41,]", "[,41]", "{}", '{"a": 41}', '{"a": 40}', '{"a": 41, }',
    '{"a": 41, "b": "x"}', '{ "a" :\n41 , "b":"x" }', '{"b": "x", "a": 41}', '{"b": "x"}', '{"b": 1}', '{"b": 41}',
    '{"b": "x", "z": 1}', '{"b": "x", "z": 41}', '{"z": 41}', '{"z": 1}', '{"z": 41, "y": 42}', '{"z": "x"}',
    '{"a": 41, "b": "x", "ü\\"": null, "z": [1]}', '{"ü\\"": 1}', '{"a": [41, {}], "b": "x"}', '{"a": [41, {}]}',
    '{"a": 41, "c": {"a": 41}}', '{"a": 41, "c": ["q", null]}', '{"a": 41, "c": {"a": 40}}', '{"a": 41, "d": ["x"]}',
    '{"a": 41, "c": {"a": 41, "c": []}, "d": [null], "e": []}', '{"c": []}', "true", "41.5", '["x"]', "",
)  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_rules_mean_what_the_library_does(backend: GrammarBackend, name: str) -> None:
    """With a small integer the library reads the schema, with a large one rules stand for it: no text may tell."""
    schema = SCHEMAS[name]
    library, rules = compiled(backend, schema), compiled(backend, put(schema, N))
    taken = [text for text in TEXTS if takes(library, text)]
    assert taken
    for text in TEXTS:
        large = re.sub(r"\b4([0-4])\b", lambda found: str(N - 1 + int(found[1])), text)
        assert takes(rules, large) == (text in taken), f"{large}: the library takes {taken}"


def test_they_agree_with_a_validator(backend: GrammarBackend) -> None:
    ends = [-N, -(N - 2), -5, 0, 5, N - 2, N, N + 2, 10**19, 2**64 - 1, 10**64 - 2]
    words = list(itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")))
    for kind, low, high in random.Random(5).sample(
        [(kind, low, high) for kind in ("integer", "number") for low in ends for high in ends if low < high], 15
    ):
        for least, most in words:
            pattern = (integers if kind == "integer" else numbers)(Bounds.of({least: low, most: high}))
            for value in (end + step for end in (low, high, (low + high) // 2) for step in (-1, 0, 1)):
                good = not list(jsonschema.Draft202012Validator({least: low, most: high}).iter_errors(value))
                assert bool(re.fullmatch(pattern, str(value))) == good, (kind, low, high, value)
            if kind == "number":
                for text, good in ((f"{low}.5", low >= 0), (f"{high}.5", high < 0), (f"{high}.0", "ex" not in most)):
                    assert bool(re.fullmatch(pattern, text)) == good, (low, high, text)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "integer", "minimum": N, "multipleOf": 3}, "multipleOf"),
        ({"type": "array", "items": {"const": N}, "uniqueItems": True}, "uniqueItems"),
        ({"allOf": [{"type": "integer"}, {"const": N}]}, "allOf"),
        ({"oneOf": [{"const": N}, {"type": "integer"}]}, "oneOf"),
        ({"type": "object", "patternProperties": {"^a": {"const": N}}}, "patternProperties"),
        ({"$ref": "#/$defs/a", "type": "integer", "$defs": {"a": {"const": N}}}, "type"),
        ({"type": "integer", "minimum": N + 1, "maximum": N}, "no value"),
        ({"type": "array", "items": [{"const": N}]}, "items"),
        ({"properties": {"a": {"const": N}, "b": {"$ref": "#/$defs/missing"}}}, "missing"),
        ({"type": "number", "minimum": 0.5, "maximum": N}, "fraction"),
        ({"type": "integer", "minimum": N, "maximum": True}, "maximum"),
        ({"type": "integer", "minimum": 10**64}, "minimum has more than 64 digits"),
    ],
)
def test_what_they_cannot_say_is_refused_by_name(backend: GrammarBackend, schema: Any, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        compiled(backend, schema)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "array", "items": {"const": N}, "maxItems": 1}, [[], [N]], [[N, N], [N - 1]]),
        ({"type": "array", "items": {"const": N}, "maxItems": 1, "minItems": 1}, [[N]], [[], [N, N]]),
        ({"type": "array", "items": {"const": N}, "maxItems": 0}, [[]], [[N]]),
        ({"type": "array", "prefixItems": [{"const": N}], "items": {}, "maxItems": 2}, [[], [N], [N, 1]], [[N, 1, 1]]),
    ],
    ids=json.dumps,
)
def test_lists_of_at_most_one(backend: GrammarBackend, schema: Any, good: list[Any], bad: list[Any]) -> None:
    grammar = compiled(backend, schema)
    assert all(takes(grammar, json.dumps(value)) for value in good)
    assert not any(takes(grammar, json.dumps(value)) for value in bad)


def test_schemas_of_which_one_holds_at_once_with_another(backend: GrammarBackend) -> None:
    """Properties say nothing of a string, so both of them hold for one."""
    with pytest.raises(InvalidRequest, match="oneOf"):
        compiled(backend, {"oneOf": [{"properties": {"a": {"const": N}}, "required": ["a"]}, {"type": "string"}]})


def test_schemas_told_apart_by_a_property(backend: GrammarBackend) -> None:
    """What is no object satisfies both."""
    schema = {"oneOf": [{"properties": {"a": {"const": value}}, "required": ["a"]} for value in (N, "s")]}
    grammar = compiled(backend, schema)
    validator = jsonschema.Draft202012Validator(schema)
    for value in ({"a": N}, {"a": "s"}, {"a": N - 1}, {}, "s", None, [N], N):
        assert takes(grammar, json.dumps(value)) == validator.is_valid(value), value
