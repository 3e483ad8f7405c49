"""What requests say about grammars becomes one Grammar, or a 400 with the field's name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.toolkit.grammars.grammar import any_of, grammar_of, parts_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "ü"}}}
TAG: dict[str, Any] = {"structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}
ALONE: dict[str, Any] = {"structures": TAG["structures"], "separator": ", "}


def test_nothing_is_no_grammar() -> None:
    assert grammar_of() is None
    assert grammar_of(json_object=False) is None


def test_a_schema_is_the_same_as_object_and_as_text() -> None:
    """Equal grammars are compiled once, so they have to be equal."""
    text = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"const":"ü"}}}'
    assert grammar_of(json_schema=SCHEMA) == Grammar("json_schema", text)  # type: ignore[arg-type]
    assert grammar_of(json_schema=json.dumps(SCHEMA, indent=3)) == Grammar("json_schema", text)
    assert grammar_of(json_schema=True) == Grammar("json_schema", "true")


def test_the_order_of_keys_is_kept() -> None:
    grammar = grammar_of(json_schema=SCHEMA)  # type: ignore[arg-type]
    assert grammar is not None
    assert grammar.source.index('"b"') < grammar.source.index('"a"')


def test_plain_kinds() -> None:
    assert grammar_of(json_object=True) == Grammar("json_object")
    assert grammar_of(regex="[a-z]+") == Grammar("regex", "[a-z]+")
    assert grammar_of(ebnf='root ::= "a"') == Grammar("ebnf", 'root ::= "a"')


def test_all_forms_of_a_structural_tag_are_one() -> None:
    tags = [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}]
    newer = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": tags}}
    plain = grammar_of(structural_tag=TAG)
    assert plain is not None
    assert json.loads(plain.source) == TAG
    assert grammar_of(structural_tag={"type": "structural_tag", **TAG}) == plain
    assert grammar_of(structural_tag=json.dumps(TAG)) == plain
    assert grammar_of(structural_tag=newer) == plain  # type: ignore[arg-type]
    flagged = grammar_of(structural_tag={**TAG, "at_least_one": True, "stop_after_first": False})
    assert flagged is not None
    assert json.loads(flagged.source) == {**TAG, "at_least_one": True}


def test_several_at_once_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="regex and ebnf exclude each other") as error:
        grammar_of(regex="a", ebnf="b")
    assert error.value.param == "ebnf"
    with pytest.raises(InvalidRequest, match="response_format and regex"):
        grammar_of(json_object=True, regex="b", names={"json_object": "response_format"})


def test_tags_without_text_between_them() -> None:
    wanted = Grammar(
        "structural_tag", json.dumps({**ALONE, "at_least_one": True}, separators=(",", ":"), ensure_ascii=False)
    )
    assert grammar_of(structural_tag={**ALONE, "at_least_one": True}) == wanted
    tags = [
        {"type": "tag", **one, "content": {"type": "json_schema", "json_schema": one["schema"]}}
        for one in ALONE["structures"]
    ]
    newer = {"type": "tags_with_separator", "separator": ALONE["separator"], "tags": tags, "at_least_one": True}
    assert grammar_of(structural_tag={"format": newer}) == wanted


def test_unions_are_their_parts() -> None:
    parts = (Grammar("regex", "a+"), Grammar("json_object"))
    assert parts_of(any_of(*parts)) == parts
    assert parts_of(parts[0]) == parts[:1]
    for source in ("", "x", "[]", "{}", "7", "[7]", '[{"kind": "regex"}]', any_of(any_of(*parts)).source):
        with pytest.raises(InvalidRequest) as caught:
            parts_of(Grammar("any_of", source))
        assert caught.value.param == "any_of"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"json_schema": 7}, "json_schema"),
        ({"json_schema": []}, "json_schema"),
        ({"json_schema": False}, "json_schema"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": '{"minimum": NaN}'}, "json_schema"),
        ({"json_schema": '{"minimum": 1e999}'}, "json_schema"),
        ({"json_schema": '{"const": "\\ud800"}'}, "json_schema"),
        ({"json_schema": "[" * 100_000}, "json_schema"),
        ({"json_schema": '{"minimum": ' + "9" * 5000 + "}"}, "json_schema"),
        ({"regex": ""}, "regex"),
        ({"regex": 3}, "regex"),
        ({"regex": "\ud800"}, "regex"),
        ({"ebnf": ["root"]}, "ebnf"),
        ({"structural_tag": "nonsense"}, "structural_tag"),
        ({"structural_tag": []}, "structural_tag"),
        ({"structural_tag": {"structures": []}}, "structural_tag.structures"),
        ({"structural_tag": {**TAG, "triggers": None}}, "structural_tag.triggers"),
        ({"structural_tag": {**TAG, "triggers": [""]}}, "structural_tag.triggers.0"),
        ({"structural_tag": {**TAG, "triggers": ["<g"]}}, "structural_tag.structures.0.begin"),
        ({"structural_tag": {**TAG, "at_least_one": 1}}, "structural_tag.at_least_one"),
        ({"structural_tag": {**TAG, "unheard_of": 1}}, "structural_tag.unheard_of"),
        ({"structural_tag": {**TAG, "structures": [7]}}, "structural_tag.structures.0"),
        (
            {"structural_tag": {**TAG, "structures": [{"begin": "<f=" + "a" * 5000, "end": ""}]}},
            "structural_tag.structures.0.begin",
        ),
        (
            {"structural_tag": {**TAG, "structures": [{"begin": "<f=", "end": "a" * 5000}]}},
            "structural_tag.structures.0.end",
        ),
        ({"structural_tag": {**TAG, "structures": [{"begin": "<f="}]}}, "structural_tag.structures.0.end"),
        (
            {"structural_tag": {**TAG, "structures": [{"begin": "<f=", "end": "", "schema": 1}]}},
            "structural_tag.structures.0.schema",
        ),
        ({"structural_tag": {**TAG, "separator": ""}}, "structural_tag.triggers"),
        ({"structural_tag": {**TAG, "begin": ""}}, "structural_tag.begin"),
        ({"structural_tag": {**ALONE, "separator": 1}}, "structural_tag.separator"),
        ({"structural_tag": {**ALONE, "end": "a" * 5000}}, "structural_tag.end"),
        ({"structural_tag": {"format": {"type": "sequence"}}}, "structural_tag.format.type"),
        (
            {"structural_tag": {"format": {"type": "triggered_tags", "tags": [{"begin": "<"}], "triggers": ["<"]}}},
            "structural_tag.format.tags.0.content",
        ),
    ],
)
def test_what_is_none_is_refused_with_its_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        grammar_of(**given)
    assert (error.value.param, error.value.status) == (param, 400)
