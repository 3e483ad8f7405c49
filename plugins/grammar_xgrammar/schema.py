"""What xgrammar makes of a JSON schema, and what it would leave out without a word.

The library takes nearly every schema and warns, on standard error, of what it ignores. An answer that the user's own
validator then refuses is worse than a refused request. So keywords that it does not enforce, alone or beside others,
are found here; and where the same can be said in words that it does enforce, that is done.
"""

from __future__ import annotations

from collections.abc import Iterator

from pegboard.core.interfaces.json_value import JsonObject, JsonValue
from pegboard.plugins.grammar_xgrammar.patterns import plain_pattern, string_pattern_problem
from pegboard.toolkit.grammars.schema_values import NUMBERS, disjoint, type_of, types_of, with_objects

ANNOTATIONS = frozenset(
    {
        "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$schema", "$vocabulary", "contentEncoding",
        "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description", "discriminator",
        "example", "examples", "externalDocs", "id", "nullable", "readOnly", "title", "writeOnly", "xml",
    }
)  # fmt: skip
STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"})
OBJECTS = frozenset(
    {
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties",
    }
)  # fmt: skip
COMBINERS = ("$ref", "anyOf", "oneOf", "allOf")
KNOWN = NUMBERS | STRINGS | ARRAYS | OBJECTS | {"type", "enum", "const", *COMBINERS}

UNENFORCED_FORMATS = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})
"""Of JSON Schema's own formats; others have been left out before, see `pegboard.toolkit.grammars.json_schema`."""


MAX_MULTIPLE = 1024
"""Largest `multipleOf` that the library does not ignore (0.2.8)."""

LONGEST = 2000
"""Longest `maxLength` that becomes a pattern: larger automata take too long."""

_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = rf"^{_LABEL}(\.{_LABEL}){{0,2}}$"
"""The library knows no limit of a host name's length; three labels stay within it."""


class NotEnforced(ValueError):
    """A schema that the library would take without enforcing all of it."""


class Reader:
    """Makes of a schema what the library enforces as it stands; `remarks` has what it would not, by place."""

    def __init__(self) -> None:
        self.remarks: list[str] = []

    def read(self, schema: JsonValue, place: str = "#") -> JsonValue:
        """Return the schema in other words. Descends as deep as the schema is nested."""
        if not isinstance(schema, dict):
            return schema
        made = dict(schema)
        for word in schema.keys() - KNOWN - ANNOTATIONS:
            if not self._harmless(word, schema):
                self._remark(place, f"{word!r} is not enforced")
        self._combiners(made, place)
        self._values(made, place)
        self._types(made, place)
        self._strings(made, place)
        self._numbers(made, place)
        self._names(made, place)
        self._required(made, place)
        for key, inner in self._children(made, place):
            made[key] = inner
        return made

    def _remark(self, place: str, text: str) -> None:
        self.remarks.append(f"{place}: {text}")

    @staticmethod
    def _harmless(word: str, schema: JsonObject) -> bool:
        if word.startswith("x-"):
            return True
        if word == "uniqueItems":
            return schema[word] is False
        if word in ("then", "else"):
            return "if" not in schema
        if word in ("minContains", "maxContains"):
            return "contains" not in schema
        return word not in (
            "additionalItems", "contains", "dependencies", "dependentRequired", "dependentSchemas", "if", "not",
            "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
        )  # fmt: skip

    def _combiners(self, made: dict[str, JsonValue], place: str) -> None:
        found = [word for word in COMBINERS if word in made]
        if not found:
            return
        beside = sorted(made.keys() & KNOWN - {found[0]})
        if beside:
            self._remark(place, f"{beside[0]!r} beside {found[0]!r} is not enforced")
        if "allOf" in made and isinstance(made["allOf"], list) and len(made["allOf"]) > 1:
            self._remark(place, "'allOf' with several schemas is not enforced")
        if "oneOf" in made:
            made["oneOf"] = with_objects(made["oneOf"])
        if "oneOf" in made and not disjoint(made["oneOf"]):
            self._remark(place, "'oneOf' is not enforced where two of its schemas may hold at once")
        ref = made.get("$ref")
        if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
            self._remark(place, f"the reference {ref[:64]!r} is not followed: only those that start with '#/' are")

    def _values(self, made: dict[str, JsonValue], place: str) -> None:
        words = [word for word in ("enum", "const") if word in made]
        if not words:
            return
        beside = sorted(made.keys() & KNOWN - {"type", words[0]} - set(COMBINERS))
        if beside:
            self._remark(place, f"{beside[0]!r} beside {words[0]!r} is not enforced")
        types = types_of(made)
        values = made["enum"] if words[0] == "enum" else [made["const"]]
        if _beyond_64_bits(values):
            self._remark(place, f"an integer of more than 64 bits in {words[0]!r} is not enforced")
        if types and isinstance(values, list):
            fitting = [value for value in values if type_of(value) & types]
            if len(fitting) != len(values):
                made.pop("const", None)
                made["enum"] = fitting  # an empty one is refused by the library

    def _types(self, made: dict[str, JsonValue], place: str) -> None:
        if any(word in made for word in (*COMBINERS, "enum", "const")):
            return
        types = types_of(made)
        if types:
            return
        words = made.keys() & (NUMBERS | STRINGS | ARRAYS | OBJECTS)
        if words and "properties" not in made and "items" not in made and "prefixItems" not in made:
            self._remark(place, f"{min(words)!r} without 'type' is not enforced")

    def _strings(self, made: dict[str, JsonValue], place: str) -> None:
        kind = made.get("format")
        if isinstance(kind, str) and kind in UNENFORCED_FORMATS:
            self._remark(place, f"the format {kind!r} is not enforced")
        if kind == "hostname" and "pattern" not in made:
            del made["format"]
            made["pattern"] = _HOSTNAME
        shaped = [word for word in ("pattern", "format") if word in made]
        if len(shaped) > 1:
            self._remark(place, "'format' beside 'pattern' is not enforced")
        if shaped and ("minLength" in made or "maxLength" in made):
            self._remark(place, f"'minLength' and 'maxLength' beside {shaped[0]!r} are not enforced")
        if not shaped:
            self._lengths(made)
        if isinstance(pattern := made.get("pattern"), str):
            if why := string_pattern_problem(pattern):
                self._remark(place, f"the pattern {pattern[:64]!r} is not enforced: {why}")
            made["pattern"] = plain_pattern(pattern)

    @staticmethod
    def _lengths(made: dict[str, JsonValue]) -> None:
        """Say the lengths of a string: the library's may hold control characters, which JSON does not."""
        least, most = made.get("minLength", 0), made.get("maxLength", "")
        if "string" not in types_of(made) or not isinstance(least, int) or not isinstance(most, (int, str)):
            return
        if (least or most != "") and (most == "" or least <= int(most) <= LONGEST):
            made["pattern"] = f'^[^"\\\\\\x00-\\x1f]{{{least},{most}}}$'
            made.pop("minLength", None)
            made.pop("maxLength", None)

    def _numbers(self, made: dict[str, JsonValue], place: str) -> None:
        if "multipleOf" in made and (types_of(made) != {"integer"} or made.keys() & (NUMBERS - {"multipleOf"})):
            self._remark(place, "'multipleOf' is enforced for integers without a range only")
        elif made.get("multipleOf", 1) not in range(1, MAX_MULTIPLE + 1):
            self._remark(place, f"'multipleOf' is enforced up to {MAX_MULTIPLE} only")
        for word in sorted(made.keys() & NUMBERS):
            bound = made[word]
            if _beyond_64_bits(bound):
                self._remark(place, f"{word!r} is enforced up to 64 bits only")
            elif "number" in types_of(made) and isinstance(bound, int) and float(bound) != bound:
                self._remark(place, f"{word!r} beyond 2**53 is enforced for integers only")

    def _names(self, made: dict[str, JsonValue], place: str) -> None:
        """Rules for names: beside names that are described or required, the library leaves one or the other out."""
        for word in ("patternProperties", "propertyNames"):
            if word in made and (beside := [one for one in ("properties", "required") if made.get(one)]):
                self._remark(place, f"{word!r} beside {beside[0]!r} is not enforced")

    def _required(self, made: dict[str, JsonValue], place: str) -> None:
        """Names that are required and described nowhere: the library asks only for those that are described."""
        required, properties = made.get("required"), made.get("properties", {})
        if not isinstance(required, list) or not isinstance(properties, dict):
            return
        missing = [name for name in required if isinstance(name, str) and name not in properties]
        if missing and ("object" in types_of(made) or "properties" in made):
            others = made.get("additionalProperties", True)
            if others is False:
                self._remark(place, f"that {missing[0]!r} is required, and not allowed, is not enforced")
            made["properties"] = {**properties, **dict.fromkeys(missing, others if isinstance(others, dict) else True)}
            made["type"] = made.get("type", "object")

    def _children(self, made: JsonObject, place: str) -> Iterator[tuple[str, JsonValue]]:
        for word in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(inner := made.get(word), dict):
                yield word, {key: self.read(one, f"{place}/{word}/{key}") for key, one in inner.items()}
        for word in ("prefixItems", "anyOf", "oneOf", "allOf"):
            if isinstance(inner := made.get(word), list):
                yield word, [self.read(one, f"{place}/{word}/{i}") for i, one in enumerate(inner)]
        for word in ("items", "additionalProperties", "propertyNames", "unevaluatedItems"):
            if isinstance(made.get(word), dict):
                yield word, self.read(made[word], f"{place}/{word}")


def _beyond_64_bits(value: JsonValue) -> bool:
    """Return whether a value is an integer that a signed one of 64 bits cannot hold, or has one in it."""
    stack = [value]
    while stack:
        inner = stack.pop()
        if isinstance(inner, (list, dict)):
            stack += inner.values() if isinstance(inner, dict) else inner
        elif isinstance(inner, int) and not -(2**63) <= inner < 2**63:
            return True
    return False


def enforceable(schema: JsonValue, *, lenient: bool = False) -> JsonValue:
    """Return the schema in words that the library enforces. Raises NotEnforced for one that cannot be said so."""
    reader = Reader()
    made = reader.read(schema)
    if reader.remarks and not lenient:
        raise NotEnforced(reader.remarks[0])
    return made
