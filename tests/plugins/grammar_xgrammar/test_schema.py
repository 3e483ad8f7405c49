"""Schemas that xgrammar would take without enforcing them are refused, or said in other words."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar.api import GrammarContext
from pegboard.plugins.grammar.suite import GrammarContract
from pegboard.plugins.grammar.suite.cases import EOS
from pegboard.plugins.grammar.suite.cases import schema as json_schema

REFUSED: tuple[Any, ...] = (
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}},
    {"not": {"type": "integer"}},
    {"if": {"type": "integer"}, "then": {"minimum": 3}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "integer", "multipleOf": 3, "minimum": 5},
    {"type": "number", "multipleOf": 0.5},
    {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
    {"type": "string", "format": "email", "minLength": 9},
    {"type": "string", "format": "email", "pattern": "a"},
    {"type": "string", "format": "iri"},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": '"'},
    {"type": "string", "pattern": "a\\\\b"},
    {"type": "string", "pattern": "\\n"},
    {"type": "string", "pattern": "\\x22"},
    {"anyOf": [{"type": "integer"}, {"type": "string"}], "minimum": 3},
    {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {}}},
    {"allOf": [{"type": "integer"}, {"minimum": 3}]},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"a": {"const": 1}}},
            {"type": "object", "properties": {"a": {"const": 2}}},
        ]
    },
    {"minimum": 3},
    {"maxLength": 3},
    {"required": ["a"]},
    {"enum": [1, "a"], "minimum": 3},
    {"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}},
    {"type": "object", "properties": {"a": {"items": {"anyOf": [{"not": {}}]}}}},
    {"type": "object", "properties": {"id": {"type": "integer"}}, "patternProperties": {"^x-": {"type": "string"}}},
    {"type": "object", "patternProperties": {"^x-": {"type": "string"}}, "required": ["x-a"]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "propertyNames": {"enum": ["a", "b"]}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "propertyNames": {"pattern": "^[a-z]$"}},
    {"type": "object", "required": ["c"], "propertyNames": {"enum": ["a", "b"]}},
    {"oneOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"type": "string"}]},
    {"anyOf": [{"type": "object", "required": ["a", "xa"], "additionalProperties": False}, {"type": "number"}]},
)

ENFORCED: tuple[tuple[Any, list[Any], list[Any]], ...] = (
    ({"type": "object", "required": ["z"]}, [{"z": 1}], [{}]),
    ({"type": "object", "required": ["z"], "additionalProperties": {"type": "integer"}}, [{"z": 1}], [{}, {"z": "a"}]),
    ({"type": "string", "enum": [1, "a"]}, ["a"], [1]),
    ({"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]}, [1, "a"], [None, 1.5]),
    ({"type": "string", "maxLength": 2}, ["", "ab"], ["abc", "\u0001"]),
    ({"type": "string", "minLength": 2, "format": "of-our-own"}, ["ab"], ["a"]),
    ({"type": "string", "pattern": "^1(\\.[0-9]+)?$"}, ["1", "1.25"], ["125"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z"]),
    ({"type": ["object", "null"], "required": ["a"]}, [{"a": 1}, {"a": 1, "b": 2}, None], [{}, {"b": 1}, 1]),
    ({"properties": {}, "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
    ({"type": "object", "patternProperties": {"^x-$": {"type": "string"}}}, [{}, {"x-": "s"}], [{"x-": 1}]),
    (
        {
            "oneOf": [
                {"properties": {"k": {"const": "a"}}, "required": ["k"]},
                {"properties": {"k": {"const": "b"}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"const": "c"}}, "required": ["k"]},
            ]
        },
        [{"k": "a"}, {"k": "b"}, {"k": "c"}],
        [{}, {"k": "d"}, "a", None],
    ),
    ({"type": "string", "pattern": "^((c{2,}|){2,})$"}, ["", "cc", "ccccc"], ["c"]),
    ({"type": "string", "pattern": "^(?:d*c{2,}|e?){1,}?$"}, ["", "e", "ccedcc"], ["c", "dec", "d"]),
    ({"type": "string", "pattern": "^(cd{0}|c+?){2,}$"}, ["cc", "ccc"], ["", "c"]),
    ({"type": "string", "pattern": "^([*]c){2,}$"}, ["*c*c"], ["", "*c"]),
    ({"type": "array", "uniqueItems": False, "maxItems": 1}, [[1]], [[1, 1]]),
    ({"allOf": [{"type": "integer"}]}, [1], ["a"]),
    ({"type": "integer", "title": "t", "x-own": 1, "deprecated": True, "$comment": "c"}, [1], ["a"]),
)


class Kit(GrammarContract):
    """The suite's tools, without its tests."""

    provider = "xgrammar"
    __test__ = False


@pytest.fixture
def backend(tmp_path: Any) -> Any:
    from pegboard.conformance.checkpoints import write_tiny_tokenizer
    from pegboard.plugins.grammar_xgrammar.backend import XGrammarBackend
    from pegboard.plugins.grammar_xgrammar.options import XGrammarOptions
    from pegboard.toolkit.text.tokenizer import Tokenizer

    write_tiny_tokenizer(tmp_path)
    ctx = GrammarContext(tmp_path, Tokenizer.from_directory(tmp_path), 352, frozenset({EOS}))
    return XGrammarBackend(XGrammarOptions(), ctx)


@pytest.mark.parametrize("schema", REFUSED, ids=json.dumps)
def test_what_is_not_enforced_is_refused(backend: Any, schema: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"enforced|followed") as error:
        backend.compile(json_schema(schema))
    assert error.value.param == "json_schema"


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda one: json.dumps(one)[:60])
def test_what_is_said_in_other_words_means_the_same(backend: Any, schema: Any, good: list[Any], bad: list[Any]) -> None:
    compiled = backend.load(json_schema(schema), backend.compile(json_schema(schema)))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    kit = Kit()
    for value in good:
        assert validator.is_valid(value)
        assert kit.spelled(compiled, json.dumps(value, ensure_ascii=False)) is not None, value
    for value in bad:
        assert kit.spelled(compiled, json.dumps(value, ensure_ascii=False)) is None, value


def test_lenient_takes_them(tmp_path: Any, backend: Any) -> None:
    from pegboard.plugins.grammar_xgrammar.backend import XGrammarBackend
    from pegboard.plugins.grammar_xgrammar.options import XGrammarOptions

    lenient = XGrammarBackend(XGrammarOptions(lenient_schemas=True), backend.ctx)
    assert lenient.compile(json_schema({"type": "array", "uniqueItems": True}))


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        ("a.b", ["axb", "aéb", "a.b"], ["a\nb", "ab"]),
        ("(.|\\n)*", ["", "a\nb"], []),
        (r"a\.[.]", ["a.."], ["axx", "a.x", "ax."]),
    ],
)
def test_a_dot_is_within_a_line(backend: Any, regex: str, good: list[str], bad: list[str]) -> None:
    compiled = backend.load(Grammar("regex", regex), backend.compile(Grammar("regex", regex)))
    assert all(Kit().spelled(compiled, text) is not None for text in good)
    assert all(Kit().spelled(compiled, text) is None for text in bad)


@pytest.mark.parametrize("regex", ["(?=a)b", "a$b", "a^b"])
def test_expressions_that_it_would_misread(backend: Any, regex: str) -> None:
    with pytest.raises(InvalidRequest):
        backend.compile(Grammar("regex", regex))
