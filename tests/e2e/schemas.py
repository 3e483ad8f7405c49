"""Two hundred JSON schemas, small enough for a small model to finish: every kind of value, bound, pattern and format,
nesting, references, unions, and what tools look like in the wild. The list is the same each time.
"""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

COUNT = 200


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    """An object with these properties and no others, all of them required unless `required` says which."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }


_WORD: Schema = {"type": "string", "pattern": "^[a-z]{1,8}$"}
_SHORT: Schema = {"type": "string", "maxLength": 12}
_SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 99}

PATTERNS = (
    "^[a-z]{1,8}$", "^[A-Z][a-z]{2,7}$", "^\\d{3}-\\d{4}$", "^(red|green|blue)$", "^#[0-9a-f]{6}$", "^v\\d+\\.\\d+$",
    "^[A-Z]{2}\\d{2,4}$", "^\\w{1,10}@\\w{1,8}\\.(com|org)$", "^(\\d{1,2}):(\\d{2})$", "^[^\\s]{1,9}$", "^a?b?c?$",
    "^(ab|cd){1,3}$", "^\\+[0-9]{6,10}$", "^[01]{8}$", "^x[yz]*$|^w$", "^é{1,2}ü$", "^\"q\"$", "^a\\\\b$",
)  # fmt: skip

FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

SCALARS: tuple[Schema, ...] = (
    {"type": "boolean"}, {"type": "null"}, {"const": "yes"}, {"const": 42}, {"const": None}, {"const": "a \"b\" \\ ü"},
    {"enum": ["red", "green", "blue"]}, {"enum": [1, "one", None, True]}, {"enum": [0.5, -3, 1000000]},
    {"type": "string", "enum": ["north", "south"]}, {"type": "integer", "enum": [1, 2, 3]}, _SMALL,
    {"type": "integer", "minimum": -5, "maximum": 5}, {"type": "integer", "exclusiveMinimum": 0, "maximum": 10},
    {"type": "integer", "minimum": 1000, "maximum": 123456}, {"type": "integer", "minimum": -250, "maximum": -17},
    {"type": "integer", "multipleOf": 5}, {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.25}, _SHORT,
    {"type": "string", "minLength": 3, "maxLength": 6}, {"type": "string", "minLength": 1, "maxLength": 1},
    {"type": "string", "maxLength": 0}, {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"type": ["string", "boolean"], "maxLength": 8}, {"type": "string", "format": "password", "maxLength": 9},
)  # fmt: skip

ARRAYS: tuple[Schema, ...] = (
    {"type": "array", "items": _SMALL, "maxItems": 5},
    {"type": "array", "items": _WORD, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 3},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
    {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [_SMALL, _WORD], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": "point"}, _SMALL, _SMALL], "items": False, "minItems": 3},
    {"type": "array", "prefixItems": [_WORD], "items": _SMALL, "minItems": 1, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": _SMALL, "minItems": 2, "maxItems": 2}, "maxItems": 3},
    {"type": "array", "items": _object({"k": _WORD, "v": _SMALL}), "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"anyOf": [_SMALL, {"type": "null"}]}, "minItems": 1, "maxItems": 4},
    {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 1, "maxItems": 2},
)

OBJECTS: tuple[Schema, ...] = (
    _object({}),
    _object({"name": _SHORT}),
    _object({"name": _WORD, "age": _SMALL}),
    _object({"a": _SMALL, "b": _SMALL, "c": _SMALL}, []),
    _object({"a": _SMALL, "b": _WORD, "c": {"type": "boolean"}}, ["b"]),
    _object({"a": _SMALL, "b": _WORD, "c": {"type": "boolean"}}, ["a", "c"]),
    _object({"first name": _WORD, "last-name": _WORD, "größe": _SMALL}),
    _object({'quote"d': _SMALL, "back\\slash": _SMALL}),
    _object({"x": _object({"y": _object({"z": _SMALL})})}),
    _object({"deep": _object({"a": _object({"b": _object({"c": _object({"d": _object({"e": _WORD})})})})})}),
    _object({"list": {"type": "array", "items": _object({"id": _SMALL}), "maxItems": 3}}),
    _object({"when": {"type": "string", "format": "date-time"}, "id": {"type": "string", "format": "uuid"}}),
    _object({"choice": {"enum": ["one", "two", 3, None]}, "fixed": {"const": {"n": [1, "x", False]}}}),
    {"type": "object", "additionalProperties": _SMALL, "maxProperties": 3},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "properties": {"id": _SMALL}, "required": ["id"], "additionalProperties": _WORD},
    {"type": "object", "patternProperties": {"^[a-z]{1,4}$": _SMALL}, "additionalProperties": False},
    {"type": "object", "properties": {"kind": _WORD}, "required": ["kind", "value"], "additionalProperties": False}
    | {"properties": {"kind": _WORD, "value": _SMALL}},
    _object({"empty": {"type": "string", "maxLength": 0}, "none": {"type": "null"}}),
    _object(
        {
            "maybe": {"type": ["string", "null"], "maxLength": 8},
            "tags": {"type": "array", "items": _WORD, "maxItems": 3},
        }
    ),
)

_POINT = _object({"x": _SMALL, "y": _SMALL})
_NODE = _object({"v": _SMALL, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}})
_TREE = _object({"label": _WORD, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}})

REFS: tuple[Schema, ...] = (
    {"$ref": "#/$defs/point", "$defs": {"point": _POINT}},
    {"$ref": "#/definitions/point", "definitions": {"point": _POINT}},
    _object({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}, **{"$defs": {"point": _POINT}}),  # type: ignore[arg-type]
    {"type": "array", "items": {"$ref": "#/$defs/w"}, "minItems": 1, "maxItems": 3, "$defs": {"w": _WORD}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": _SMALL}},
    {"$ref": "#/$defs/node", "$defs": {"node": _NODE}},
    {"$ref": "#/$defs/tree", "$defs": {"tree": _TREE}},
    _object({"root": {"$ref": "#/$defs/tree"}, "count": _SMALL}, **{"$defs": {"tree": _TREE}}),  # type: ignore[arg-type]
    _object({"head": _SMALL, "tail": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    _object(
        {"u": {"$ref": "#/$defs/user"}},
        **{"$defs": {"user": _object({"n": _WORD, "at": {"$ref": "#/$defs/p"}}), "p": _POINT}},  # type: ignore[arg-type]
    ),
    {"anyOf": [{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/w"}], "$defs": {"p": _POINT, "w": _WORD}},
    {
        "$ref": "#/$defs/even",
        "$defs": {
            "even": _object({"odd": {"anyOf": [{"$ref": "#/$defs/odd"}, {"type": "null"}]}}),
            "odd": _object({"even": {"anyOf": [{"$ref": "#/$defs/even"}, {"type": "null"}]}}),
        },
    },
)


def _tagged(*kinds: str) -> list[Schema]:
    return [_object({"kind": {"const": kind}, kind: _SMALL}) for kind in kinds]


UNIONS: tuple[Schema, ...] = (
    {"anyOf": [_SMALL, _WORD]},
    {"anyOf": [{"type": "null"}, _object({"a": _SMALL})]},
    {"anyOf": [{"type": "array", "items": _SMALL, "maxItems": 2}, {"type": "boolean"}, {"const": "x"}]},
    {"anyOf": _tagged("circle", "square")},
    {"oneOf": _tagged("cat", "dog", "cow")},
    {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
    _object({"shape": {"oneOf": _tagged("circle", "square")}, "n": _SMALL}),
    _object({"v": {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]}}),
    _object({"a": {"anyOf": [_SMALL, {"type": "null"}]}, "b": {"anyOf": [_WORD, {"type": "null"}]}}),
    {"type": "array", "items": {"oneOf": _tagged("p", "q")}, "minItems": 1, "maxItems": 2},
    {"type": ["integer", "boolean", "null"], "minimum": 1, "maximum": 3},
    {"anyOf": [{"enum": ["a", "b"]}, {"enum": ["c", 4]}]},
    {"allOf": [_object({"a": _SMALL})]},
    {"allOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 7}]},
    {"allOf": [{"type": "object", "properties": {"a": _SMALL}, "required": ["a"]},
               {"type": "object", "properties": {"b": _WORD}, "required": ["b"], "maxProperties": 2}]},
    {"type": "string", "allOf": [{"maxLength": 5}, {"minLength": 2}]},
)  # fmt: skip

WILD: tuple[Schema, ...] = (
    _object({"location": _SHORT, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, ["location"]),
    _object({"query": _SHORT, "limit": {"type": "integer", "minimum": 1, "maximum": 50, "default": 10}}),
    _object(
        {"to": {"type": "string", "format": "email"}, "subject": _SHORT, "body": {"type": "string", "maxLength": 30}}
    ),
    _object(
        {
            "title": _SHORT,
            "start": {"type": "string", "format": "date-time"},
            "minutes": _SMALL,
            "guests": {"type": "array", "items": _WORD, "maxItems": 3},
        }
    ),
    _object(
        {
            "sku": {"type": "string", "pattern": "^[A-Z]{3}-\\d{4}$"},
            "price": {"type": "number", "minimum": 0, "maximum": 999},
            "in_stock": {"type": "boolean"},
        }
    ),
    _object(
        {
            "sentiment": {"enum": ["positive", "neutral", "negative"]},
            "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        }
    ),
    _object(
        {
            "steps": {
                "type": "array",
                "minItems": 1,
                "maxItems": 3,
                "items": _object({"explanation": _SHORT, "output": _SHORT}),
            },
            "final_answer": _SHORT,
        }
    ),
    _object({"name": {"type": "string", "const": "search"}, "arguments": _object({"q": _SHORT})}),
    {"title": "Person", "description": "A person", "$schema": "https://json-schema.org/draft/2020-12/schema"}
    | _object(
        {"firstName": {"title": "First", "type": "string", "maxLength": 9}, "age": {"description": "years", **_SMALL}},
        ["firstName"],
    ),
    _object(
        {
            "ip": {"type": "string", "format": "ipv4"},
            "port": {"type": "integer", "minimum": 1, "maximum": 65535},
            "tls": {"type": "boolean"},
        }
    ),
    _object(
        {
            "invoice": _object(
                {
                    "number": {"type": "string", "pattern": "^\\d{4,6}$"},
                    "lines": {
                        "type": "array",
                        "minItems": 1,
                        "maxItems": 2,
                        "items": _object({"item": _WORD, "qty": _SMALL}),
                    },
                }
            )
        }
    ),
    _object(
        {
            "coordinates": {
                "type": "array",
                "prefixItems": [
                    {"type": "number", "minimum": -90, "maximum": 90},
                    {"type": "number", "minimum": -180, "maximum": 180},
                ],
                "items": False,
                "minItems": 2,
            }
        }
    ),
    _object(
        {
            "thought": _SHORT,
            "action": {
                "anyOf": [_object({"type": {"const": "say"}, "text": _SHORT}), _object({"type": {"const": "stop"}})]
            },
        }
    ),
    _object(
        {
            "entities": {
                "type": "array",
                "maxItems": 3,
                "items": _object({"text": _WORD, "label": {"enum": ["PER", "ORG", "LOC"]}}),
            }
        }
    ),
    _object(
        {"x-vendor": _SMALL, "meta": {"type": "object", "additionalProperties": _WORD, "maxProperties": 2}},
        **{"x-internal": True},  # type: ignore[arg-type]
    ),
)


def corpus() -> list[tuple[str, Schema]]:
    """All schemas, each with a name that says what it is about."""
    found: list[tuple[str, Schema]] = []
    groups = {
        "scalar": SCALARS,
        "pattern": tuple({"type": "string", "pattern": pattern} for pattern in PATTERNS),
        "format": tuple({"type": "string", "format": name} for name in FORMATS),
        "array": ARRAYS,
        "object": OBJECTS,
        "ref": REFS,
        "union": UNIONS,
        "wild": WILD,
    }
    for group, schemas in groups.items():
        found += [(f"{group}-{number}", schema) for number, schema in enumerate(schemas)]
    rng = random.Random(2024)
    while len(found) < COUNT:
        found.append((f"composed-{len(found)}", _composed(rng, 3)))
    assert len(found) == COUNT
    return found


def _composed(rng: random.Random, depth: int) -> Schema:
    """A random schema of objects, arrays and unions, with scalars at the leaves."""
    leaves = (*SCALARS, *({"type": "string", "pattern": pattern} for pattern in PATTERNS[:9]))
    if depth == 0:
        return dict(rng.choice(leaves))
    kind = rng.choice(["object", "object", "object", "array", "union"])
    if kind == "array":
        most = rng.randint(1, 3)
        return {"type": "array", "items": _composed(rng, depth - 1), "minItems": rng.randint(0, most), "maxItems": most}
    if kind == "union":
        return {"anyOf": [_composed(rng, depth - 1), dict(rng.choice(leaves))]}
    names = rng.sample(["id", "name", "size", "state", "owner", "note", "kind", "at"], rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    return _object({name: _composed(rng, depth - 1 - rng.randint(0, depth - 1)) for name in names}, required)
