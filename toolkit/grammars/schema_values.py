"""Types and values of JSON schemas, and whether two schemas exclude each other by them."""

from __future__ import annotations

from pegboard.core.interfaces.json_value import JsonObject, JsonValue
from pegboard.toolkit.grammars.json_schema import MAX_DEPTH, target_of

NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
"""Keywords of numbers."""

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def types_of(schema: JsonObject) -> set[str]:
    """Return the types that a schema names; none where it names none."""
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    return {one for one in kind if isinstance(one, str)} if isinstance(kind, list) else set()


def type_of(value: JsonValue) -> set[str]:
    """Return the types that a value has: an integer is a number, too."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"number", "integer"}
    if isinstance(value, float):
        return {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


class PossibleTypes:
    """The types that values of a schema may have, references and combinations followed."""

    def __init__(self, root: JsonObject) -> None:
        """`root` is what references start from."""
        self._root = root
        self._known: dict[str, frozenset[str]] = {}

    def of(self, schema: JsonValue, depth: int = 0) -> frozenset[str]:
        """Return the types; all of them where the schema does not say. An integer is a number, too."""
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            return frozenset() if schema is False else TYPES
        found = TYPES
        if types := types_of(schema):
            found &= types | ({"integer"} if "number" in types else set())
        if "const" in schema or isinstance(schema.get("enum"), list):
            found &= {kind for value in _fixed(schema) for kind in type_of(value)}
        if isinstance(ref := schema.get("$ref"), str):
            found &= self._target(ref, depth)
        for word in ("anyOf", "oneOf", "allOf"):
            options = schema.get(word)
            if isinstance(options, list) and options:
                inner = [self.of(option, depth + 1) for option in options]
                found &= frozenset.intersection(*inner) if word == "allOf" else frozenset.union(*inner)
        return found

    def _target(self, ref: str, depth: int) -> frozenset[str]:
        if ref not in self._known:
            self._known[ref] = TYPES  # for a reference that leads to itself
            self._known[ref] = self.of(target_of(self._root, ref), depth + 1)
        return self._known[ref]


def disjoint(schemas: JsonValue) -> bool:
    """Return whether no value satisfies two of them, as far as types and single-valued properties say."""
    if not isinstance(schemas, list):
        return False
    return all(_apart(one, other) for at, one in enumerate(schemas) for other in schemas[at + 1 :])


def with_objects(schemas: JsonValue) -> JsonValue:
    """Return the schemas of a ``oneOf`` in which those that describe properties name the type `object`, too, where that
    changes nothing: all of them are of objects, or hold for whatever is not one, and of the latter there are several.
    """
    if not isinstance(schemas, list):
        return schemas
    loose = [isinstance(one, dict) and "properties" in one and one.keys() <= _OF_OBJECTS for one in schemas]
    objects = [isinstance(one, dict) and types_of(one) == {"object"} for one in schemas]
    if sum(loose) < 2 or not all(a or b for a, b in zip(loose, objects, strict=True)):
        return schemas
    return [{"type": "object", **one} if isinstance(one, dict) else one for one in schemas]


_OF_OBJECTS = frozenset(
    {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "title", "description", "$comment", "default", "examples",
    }
)  # fmt: skip
"""Keywords that say nothing of values that are no objects."""


def _apart(one: JsonValue, other: JsonValue) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    first, second = _possible_types(one), _possible_types(other)
    if first and second and not first & second:
        return True
    if first == second == {"object"}:
        return any(
            _values_apart(mine, other.get("properties", {}).get(name))
            for name, mine in one.get("properties", {}).items()
            if name in one.get("required", ()) and name in other.get("required", ())
        )
    return _values_apart(one, other)


def _possible_types(schema: JsonObject) -> set[str]:
    types = types_of(schema) or {kind for value in _fixed(schema) for kind in type_of(value)}
    return types | {"integer"} if "number" in types else types


def _values_apart(one: JsonValue, other: JsonValue) -> bool:
    mine, theirs = _fixed(one), _fixed(other)
    return bool(mine) and bool(theirs) and not any(value in theirs for value in mine)


def _fixed(schema: JsonValue) -> list[JsonValue]:
    if not isinstance(schema, dict):
        return []
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else []
