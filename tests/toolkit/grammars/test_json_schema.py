"""What is known of a schema before a library descends into it."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.grammars.json_schema import MAX_DEPTH, PATTERNS, checked_schema, schema_of
from pegboard.toolkit.grammars.regex_length import forced_length

NODE = {"type": "object", "properties": {"next": {"$ref": "#"}}}


def of(value: Any) -> Any:
    return schema_of(json.dumps(value))


@pytest.mark.parametrize(
    "value",
    [
        True,
        {},
        NODE,
        {**NODE, "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 0},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"type": ["array", "null"], "items": {"$ref": "#/$defs/a"}, "minItems": 1}},
        },
        {"$ref": "#/$defs/a~1b/properties/c~0d", "$defs": {"a/b": {"properties": {"c~d": {"type": "integer"}}}}},
        {"$id": "http://example.com/s", "$ref": "other", "$defs": {"o": {"$id": "http://example.com/other"}}},
        {"enum": [{"$ref": "http://example.com"}]},
        {"properties": {"$ref": {"type": "string"}, "format": {"type": "string"}}},
        {"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 1, "items": {"$ref": "#"}},
    ],
)
def test_what_ends_is_taken(value: Any) -> None:
    assert of(value) == value


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"$ref": "#"}, "without end"),
        ({**NODE, "required": ["next"]}, "without end"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "without end"),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "without end"),
        ({"allOf": [{"type": "integer"}, {"$ref": "#"}]}, "without end"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "without end"),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["x"]}, "without end"),
        (
            {
                "anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}],
                "$defs": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}},
            },
            "without end",
        ),
        ({"$ref": "https://example.com/x.json"}, "leads outside"),
        ({"items": {"properties": {"a": {"$ref": "file:///etc/passwd"}}}}, "leads outside"),
        ({"pattern": "(a{999}){999}"}, "more than 20000"),
        ({"pattern": "a{1,999999999999999999999}"}, "counts to more"),
        (False, "allows nothing"),
        ([1], "an object, or true"),
        ("x", "an object, or true"),
    ],
)
def test_what_does_not_is_refused(value: Any, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what) as error:
        of(value)
    assert error.value.param == "json_schema"


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, '{"a":' * 200 + "1" + "}" * 200, "", '{"minimum": 1e999, "x": [}']
)
def test_what_is_no_json_or_too_deep(text: str) -> None:
    with pytest.raises(InvalidRequest):
        schema_of(text)


def test_the_depth_that_is_allowed() -> None:
    value: Any = {}
    while len(json.dumps(value)) < 10 * (MAX_DEPTH - 1):
        value = {"items": value}
    depth = json.dumps(value).count("{")
    assert of(value) == value if depth <= MAX_DEPTH else True
    assert depth > 60


def test_formats_of_nobody_are_remarks() -> None:
    found = of({"properties": {"a": {"type": "string", "format": "of-our-own"}, "b": {"format": "email"}}})
    assert found == {"properties": {"a": {"type": "string"}, "b": {"format": "email"}}}
    assert of({"enum": [{"format": "of-our-own"}]}) == {"enum": [{"format": "of-our-own"}]}


def test_dates_know_the_calendar() -> None:
    """Every day of some years, and every month's days up to 33, against datetime."""
    pattern = re.compile(PATTERNS["date"])
    for year in (1, 4, 100, 400, 999, 1900, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            for day in range(34):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    datetime.date.fromisoformat(text)
                    valid = True
                except ValueError:
                    valid = False
                assert bool(pattern.search(text)) == valid, text
    assert not pattern.search("0000-01-01")
    moment = re.compile(PATTERNS["date-time"])
    assert moment.search("2024-02-29T23:59:59.5+01:00")
    assert not moment.search("2023-02-29T10:00:00Z")
    assert not moment.search("2024-01-01 10:00:00Z")


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        ("", 0),
        ("abc", 3),
        ("a{10}", 10),
        ("(ab){10}", 20),
        ("(a{10}){10}", 100),
        ("a|bcd|ef", 3),
        ("(a|bcd){2}e", 7),
        ("[a-z]{4}", 4),
        ("[]x]{4}", 4),
        ("\\d{3}", 3),
        ("\\x41{3}", 3),
        ("\\u{1F600}{3}", 3),
        ("a*b+c?", 3),
        ("a{0,9}", 1),
        ("a{,9}", 1),
        ("a{x}", 4),
        ("^a$", 1),
        ("(?:ab)?", 3),
        ("((a{9}", 9),
        ("a)b", 2),
        ("x(a{30}|b{40}){2}", 81),
    ],
)
def test_how_much_an_expression_asks_for(pattern: str, length: int) -> None:
    assert forced_length(pattern) == length


TEXT = "word " * 300


def chained(count: int) -> dict[str, Any]:
    """Each definition has the next one twice."""
    twice = {
        f"d{i}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"},
            "required": ["a", "b"],
        }
        for i in range(count)
    }
    return {"$defs": {**twice, f"d{count}": {"const": "x"}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "value",
    [
        {"const": TEXT * 20},
        {"enum": ["a", [TEXT] * 20]},
        {"type": "object", "properties": {TEXT * 20: {}}, "required": [TEXT * 20]},
        {"properties": {key: {"const": TEXT} for key in "abcdefghijklmnop"}, "required": list("abcdefghijklmnop")},
        {"type": "array", "items": {"const": TEXT}, "minItems": 20},
        {"type": "array", "items": {"const": 1}, "minItems": 10**9},
        {"type": "array", "prefixItems": [{"const": TEXT}] * 20},
        {"anyOf": [{"type": "null"}, {"const": TEXT * 20}]},
        {"$defs": {"t": {"const": TEXT}}, "type": "array", "items": {"$ref": "#/$defs/t"}, "minItems": 20},
        {"type": "array", "items": {"pattern": f"^{TEXT}$"}, "minItems": 20},
        chained(16),
    ],
)  # fmt: skip
def test_what_asks_for_too_much_text_at_once(value: Any) -> None:
    """A grammar that leaves no choice for so long is looked at to its end for every token, while everybody waits."""
    with pytest.raises(InvalidRequest, match="more than 20000 characters at once") as caught:
        of(value)
    assert caught.value.code == "grammar_too_large"


@pytest.mark.parametrize(
    "value",
    [
        {"const": TEXT * 10},
        {"enum": [f"{TEXT} {i}" for i in range(100)]},
        {"type": "object", "properties": {f"property {i}": {"type": "string"} for i in range(2000)}},
        {"type": "array", "items": {"type": "string"}, "minItems": 10**6},
        {"anyOf": [{"const": f"{TEXT} {i}"} for i in range(100)]},
        {"type": "object", "properties": {"text": {"const": TEXT * 5}, "next": {"$ref": "#"}}, "required": ["text"]},
        chained(8),
        {"$ref": "#/$defs/0", "$defs": {str(i): {"items": {"$ref": f"#/$defs/{(i + 1) % 900}"}} for i in range(900)}},
    ],
)  # fmt: skip
def test_what_does_not(value: Any) -> None:
    assert of(value)


@pytest.mark.parametrize("value", [1e400, float("nan"), 0, -1, 1000003, 0.1234567, 10**400 + 1, 1e-300 * 7000001])
def test_multiples_that_no_automaton_can_tell_apart(value: float) -> None:
    with pytest.raises(InvalidRequest, match="multipleOf") as error:
        checked_schema({"properties": {"a": {"type": "number", "multipleOf": value}}})
    assert error.value.status == 400


@pytest.mark.parametrize("value", [1, 0.1, 0.25, 1e-5, 10**9, 2**40, 3600, 86400.0, 99991, True, "a"])
def test_multiples_that_libraries_may_see(value: float) -> None:
    assert checked_schema({"type": "number", "multipleOf": value})["multipleOf"] is value  # type: ignore[call-overload, index]
