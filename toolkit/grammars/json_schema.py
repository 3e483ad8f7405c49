"""JSON schemas from clients: checks before a library parses them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from urllib.parse import unquote, urldefrag

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.json_value import JsonObject, JsonValue
from pegboard.toolkit.grammars.regex_length import MAX_FORCED, check_length, forced_length

MAX_DEPTH = 128
"""How deep the JSON of a schema may be nested: libraries descend by recursion, and some without looking."""

MAX_MULTIPLE = 100_000
"""Largest `multipleOf`, without its factors 2 and 5 and its decimal point: an automaton has a state per remainder."""

SPEC_FORMATS = frozenset(
    {
        "date", "date-time", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6",
        "uuid", "uri", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer",
        "relative-json-pointer", "regex",
    }
)  # fmt: skip
"""The formats that JSON Schema defines. Any other is a remark for people, by the standard."""

_YEAR = r"([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|"
    rf"02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
PATTERNS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}T{_TIME}$", "time": f"^{_TIME}$"}
"""Formats that libraries know too roughly, with a 30th of February, say."""
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = (
    "items", "additionalItems", "contains", "additionalProperties", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties", "not", "if", "then", "else",
)  # fmt: skip


def schema_of(text: str, param: str = "json_schema") -> JsonValue:
    """Return the schema (an object or true) of a JSON text, without formats that are none of the standard's, and with
    dates and times as patterns that know the calendar.

    Raises InvalidRequest for what is not a schema, is nested too deeply, refers to something outside itself, or asks
    for a value that contains itself without end.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else f"it is not valid JSON: {error}"
        raise _refused(param, why) from None
    return checked_schema(schema, param)


def checked_schema(schema: JsonValue, param: str = "json_schema") -> JsonValue:
    """As `schema_of`, for a schema that is read already, and is changed."""
    if _depth(schema) > MAX_DEPTH:
        raise _refused(param, f"it is nested deeper than {MAX_DEPTH} levels")
    if schema is False:
        raise _refused(param, "the schema false allows nothing at all")
    if not isinstance(schema, dict):
        if schema is True:
            return True
        raise _refused(param, "a schema is an object, or true")
    _settle_formats(schema)
    known = {name.rstrip("#") for one in schemas_in(schema) if isinstance(name := one.get("$id"), str)}
    for one in schemas_in(schema):
        ref = one.get("$ref")
        if isinstance(ref, str) and not ref.startswith("#") and not _within(ref, known):
            raise _refused(param, f"the reference {ref[:100]!r} leads outside the schema, and nothing is fetched")
        if isinstance(pattern := one.get("pattern"), str):
            check_length(pattern, param)
        _check_multiple(one.get("multipleOf"), param)
    if not _Finite(schema).holds():
        raise _refused(param, "every value that it describes contains itself, without end", "grammar_without_end")
    if _Length(schema).most() > MAX_FORCED:
        why = f"its constants, names and least counts ask for more than {MAX_FORCED} characters at once"
        raise _refused(param, why, "grammar_too_large")
    return schema


def _check_multiple(value: JsonValue, param: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return  # libraries refuse what is not a number, or there is none
    if not 0 < value < math.inf:
        raise _refused(param, f"multipleOf must be a finite number greater than 0, got {value}")
    remainders = value if isinstance(value, int) else int("".join(map(str, Decimal(repr(value)).as_tuple().digits)))
    for factor in (2, 5):
        while remainders % factor == 0:
            remainders //= factor
    if remainders > MAX_MULTIPLE:
        why = f"a multipleOf has {len(bin(remainders)) - 2} significant bits, which is too many to keep track of"
        raise _refused(param, why, "grammar_too_large")


def _refused(param: str, why: str, code: str = "invalid_grammar") -> InvalidRequest:
    return InvalidRequest(f"{param}: {why}", param=param, code=code)


def _depth(value: JsonValue) -> int:
    """Return how deep it is nested, by a stack of its own."""
    deepest, stack = 0, [(value, 1)]
    while stack:
        one, depth = stack.pop()
        deepest = max(deepest, depth)
        if depth > MAX_DEPTH:
            break
        if isinstance(one, dict):
            stack += [(inner, depth + 1) for inner in one.values()]
        elif isinstance(one, list):
            stack += [(inner, depth + 1) for inner in one]
    return deepest


def schemas_in(schema: JsonValue) -> Iterator[dict[str, JsonValue]]:
    """Yield the schema and all that stand in it, where schemas stand: what looks like one in an `enum` is a value."""
    if not isinstance(schema, dict):
        return
    yield schema
    for word in _MAPS:
        if isinstance(schema.get(word), dict):
            for one in schema[word].values():
                yield from schemas_in(one)
    for word in _LISTS:
        if isinstance(schema.get(word), list):
            for one in schema[word]:
                yield from schemas_in(one)
    for word in _SINGLE:
        yield from schemas_in(schema.get(word))
    if isinstance(schema.get("items"), list):
        for one in schema["items"]:
            yield from schemas_in(one)


def _settle_formats(schema: dict[str, JsonValue]) -> None:
    for one in schemas_in(schema):
        name = one.get("format")
        if isinstance(name, str) and name not in SPEC_FORMATS:
            del one["format"]
        elif name in PATTERNS and "pattern" not in one:
            del one["format"]
            one["pattern"] = PATTERNS[name]


def _within(ref: str, known: set[str]) -> bool:
    base = urldefrag(ref).url
    return any(base == one or one.endswith(f"/{base}") for one in known)


class _Finite:
    """Whether a schema describes some finite value: the least fixed point over its references."""

    def __init__(self, schema: JsonObject) -> None:
        self._root = schema
        self._known: dict[str, bool] = {}
        self._more = False

    def holds(self) -> bool:
        """For the schema, and for all that is referred to: an endless branch has no way back."""
        return self._settled(self._root) and all(self._settled({"$ref": ref}) for ref in refs_in(self._root))

    def _settled(self, schema: JsonValue) -> bool:
        found = self._of(schema)
        while not found and self._more:
            self._more = False
            for ref, known in list(self._known.items()):
                if not known and self._of(self._target(ref)):
                    self._known[ref] = self._more = True
            found = self._of(schema)
        return found

    def _of(self, schema: JsonValue) -> bool:
        if not isinstance(schema, dict):
            return schema is not False
        if "enum" in schema or "const" in schema:
            return True
        if isinstance(schema.get("$ref"), str) and not self._ref(schema["$ref"]):
            return False
        if isinstance(schema.get("allOf"), list) and not all(map(self._of, schema["allOf"])):
            return False
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list) and schema[word] and not any(map(self._of, schema[word])):
                return False
        kind = schema.get("type")
        kinds = {kind} if isinstance(kind, str) else set(map(str, kind)) if isinstance(kind, list) else set()
        if not kinds or kinds - {"object", "array"}:
            return True
        return ("object" in kinds and self._object(schema)) or ("array" in kinds and self._array(schema))

    def _ref(self, ref: str) -> bool:
        if ref not in self._known:
            self._known[ref] = False
            self._more = True
        return self._known[ref]

    def _object(self, schema: JsonObject) -> bool:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(required, list):
            return True
        properties = properties if isinstance(properties, dict) else {}
        others = schema.get("additionalProperties", True)
        return all(self._of(properties.get(name, others)) for name in required if isinstance(name, str))

    def _array(self, schema: JsonObject) -> bool:
        least, first = schema.get("minItems", 0), schema.get("prefixItems")
        first = first if isinstance(first, list) else []
        if not isinstance(least, (int, float)) or least <= 0:
            return True
        wanted = first[: int(min(least, len(first)))]
        return all(map(self._of, wanted)) and (len(wanted) >= least or self._of(schema.get("items", True)))

    def _target(self, ref: str) -> JsonValue:
        return target_of(self._root, ref)


class _Length:
    """How much text a schema may ask for in one go, about: constants, names, and what has to be there several times.
    Of alternatives the longest counts, and nothing of a schema within itself.
    """

    def __init__(self, schema: JsonObject) -> None:
        self._root = schema
        self._known: dict[str, int] = {}

    def most(self) -> int:
        """In characters. By a stack of its own, as references may lead on and on."""
        begun: set[str] = set()
        stack: list[tuple[str, Iterator[str]]] = [("", refs_in(self._root))]
        while stack:
            ref, inner = stack[-1]
            following = next((one for one in inner if one not in begun), None)
            if following is not None:
                begun.add(following)
                stack.append((following, refs_in(target_of(self._root, following))))
                continue
            stack.pop()
            if ref:
                self._known[ref] = self._of(target_of(self._root, ref))
        return self._of(self._root)

    def _of(self, schema: JsonValue) -> int:
        if not isinstance(schema, dict):
            return 0
        if "const" in schema:
            return _size(schema["const"])
        if isinstance(schema.get("enum"), list):
            return max(map(_size, schema["enum"]), default=0)
        length = self._known.get(schema["$ref"], 0) if isinstance(schema.get("$ref"), str) else 0
        if isinstance(schema.get("pattern"), str):
            length += forced_length(schema["pattern"])
        for word in ("allOf", "anyOf", "oneOf"):
            if isinstance(schema.get(word), list) and schema[word]:
                lengths = list(map(self._of, schema[word]))
                length += sum(lengths) if word == "allOf" else max(lengths)
        return length + self._object(schema) + self._array(schema)

    def _object(self, schema: JsonObject) -> int:
        properties, required = schema.get("properties"), schema.get("required")
        properties = properties if isinstance(properties, dict) else {}
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        others = self._of(schema.get("additionalProperties"))
        sizes = {name: _size(name) + self._of(one) for name, one in properties.items()}
        always = sum(sizes.get(name, _size(name) + others) for name in needed)
        return always + max((size for name, size in sizes.items() if name not in needed), default=0)

    def _array(self, schema: JsonObject) -> int:
        least, first, items = schema.get("minItems", 0), schema.get("prefixItems"), self._of(schema.get("items"))
        least = int(min(least, MAX_FORCED + 1)) if isinstance(least, (int, float)) and least > 0 else 0
        begins = [self._of(one) for one in first] if isinstance(first, list) else []
        return sum(begins) + items * max(1, least - len(begins))


def refs_in(schema: JsonValue) -> Iterator[str]:
    """Yield all references that stand in a schema."""
    return (ref for one in schemas_in(schema) if isinstance(ref := one.get("$ref"), str))


def _size(value: JsonValue) -> int:
    return len(json.dumps(value, ensure_ascii=False))


def target_of(root: JsonObject, ref: str) -> JsonValue:
    """Return what a reference within the schema points at; true where that is not clear, which is others' to refuse."""
    if ref == "#":
        return root
    if not ref.startswith("#/"):
        return True
    here: JsonValue = root
    for part in unquote(ref[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and name in here:
            here = here[name]
        elif isinstance(here, list) and name.isdigit() and int(name) < len(here):
            here = here[int(name)]
        else:
            return True
    return here
