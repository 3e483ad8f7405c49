"""Schemas with integers beyond 2**53, exactly.

llguidance keeps every number of a schema as a double. What leads from the root of a schema to such an integer is
therefore written as Lark rules, with the integer as digits and a range as an expression; all the rest stays JSON
schema (``%json``), which the library reads itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import unquote

from pegboard.core.interfaces.json_value import JsonObject, JsonValue
from pegboard.plugins.grammar_llguidance.ranges import Bounds, integers, numbers
from pegboard.toolkit.grammars.json_schema import refs_in, schemas_in, target_of
from pegboard.toolkit.grammars.schema_values import NUMBERS, disjoint, type_of, types_of, with_objects

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

EXACT = 2**53
"""Doubles tell all integers up to this one apart."""

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_COMBINERS = ("$ref", "anyOf", "oneOf", "allOf")
_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
_ARRAYS = frozenset({"prefixItems", "items", "minItems", "maxItems"})
_STRINGS = frozenset({"minLength", "maxLength", "pattern", "format"})
_SAID = frozenset({"type", "enum", "const", *_COMBINERS}) | NUMBERS | _OBJECTS | _ARRAYS | _STRINGS
_NOT_SAID = frozenset(
    {
        "patternProperties", "minProperties", "maxProperties", "propertyNames", "unevaluatedProperties",
        "dependentRequired", "dependentSchemas", "dependencies", "additionalItems", "unevaluatedItems", "contains",
        "minContains", "maxContains", "uniqueItems", "not", "if", "then", "else", "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
_STRING = r'"([^"\\\x00-\x1F\x7F]|\\(["\\bfnrt]|u[0-9a-fA-F]{4}))*"'


def needs_rules(schema: JsonValue) -> bool:
    """Return whether a schema has an integer that not every double tells from its neighbours."""
    return any(map(_has_big, schemas_in(schema)))


def _has_big(schema: JsonObject) -> bool:
    return _holds_big([schema.get("const"), schema.get("enum")]) or any(_beyond(schema.get(word)) for word in NUMBERS)


def _holds_big(value: JsonValue) -> bool:
    """Return whether a value is such an integer, or holds one."""
    stack = [value]
    while stack:
        inner = stack.pop()
        if isinstance(inner, dict):
            stack += inner.values()
        elif isinstance(inner, list):
            stack += inner
        elif isinstance(inner, int) and _beyond(inner):
            return True
    return False


def _beyond(value: JsonValue) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not -EXACT <= value <= EXACT


def _unsaid(word: str) -> ValueError:
    return ValueError(f"{word!r} is not supported beside an integer beyond 2**53, or on the way to one")


class ExactRules:
    """The Lark rules of one schema: `start` is the name of its own, `lines` has all of them.

    Raises ValueError, naming it, for a keyword on the way to such an integer that these rules cannot say.
    """

    def __init__(self, schema: JsonObject, options: JsonCompileOptions, whitespace: str, prefix: str = "s") -> None:
        """`whitespace` is an expression for white space between parts, "" for none; `prefix`, in lower case, begins
        the names of the rules.
        """
        self._reach = _Reach(schema)
        self._options = options
        self._prefix = prefix
        self._space = f"{prefix.upper()}W? " if whitespace else ""
        self._rules: dict[str, list[str]] = {}
        self._names: dict[int, tuple[str, JsonObject]] = {}
        """The rule of each schema, by the schema's identity. The schema is kept, or another could get the same."""
        self._read_by_library: dict[str, str] = {}
        """The rule of each schema that is left to the library, by its text."""
        self._pending: list[tuple[str, JsonObject]] = []
        self.start = self._rule_of(schema)
        while self._pending:
            name, pending = self._pending.pop()
            self._rules[name] += self._alternatives(pending)
            if not self._rules[name]:
                raise ValueError("no value satisfies the part of the schema that has an integer beyond 2**53")
        self.lines = [f"{name}: {' | '.join(bodies)}" for name, bodies in self._rules.items()]
        if whitespace:
            self.lines.append(f"{prefix.upper()}W: /{whitespace}/")

    def _rule(self, *bodies: str) -> str:
        name = f"{self._prefix}r{len(self._rules)}"
        self._rules[name] = list(bodies)
        return name

    def _terminal(self, body: str) -> str:
        name = f"{self._prefix.upper()}T{len(self._rules)}"
        self._rules[name] = [body]
        return name

    def _rule_of(self, schema: JsonValue) -> str:
        """Return what stands for a schema within a rule."""
        if not isinstance(schema, dict) or not self._reach.of(schema):
            return self._plain(schema if isinstance(schema, dict) else {})
        if id(schema) not in self._names:
            self._names[id(schema)] = self._rule(), schema
            self._pending.append(self._names[id(schema)])
        return self._names[id(schema)][0]

    def _plain(self, schema: JsonObject) -> str:
        text = "%json " + json.dumps({**self._reach.closed(schema), "x-guidance": self._options})
        if text not in self._read_by_library:
            self._read_by_library[text] = self._rule(text)
        return self._read_by_library[text]

    def _alternatives(self, schema: JsonObject) -> Iterator[str]:
        if unsaid := sorted(schema.keys() & _NOT_SAID):
            raise _unsaid(unsaid[0])
        combiner = next((word for word in _COMBINERS if word in schema), "")
        if not combiner:
            yield from self._values(schema) if schema.keys() & {"enum", "const"} else self._typed(schema)
            return
        if beside := sorted(schema.keys() & _SAID - {combiner}):
            raise _unsaid(beside[0])
        inner = with_objects(schema[combiner]) if combiner == "oneOf" else schema[combiner]
        if combiner == "$ref":
            yield self._rule_of(self._reach.target(str(inner)))
            return
        schemas = inner if isinstance(inner, list) else []
        if (combiner == "allOf" and len(schemas) > 1) or (combiner == "oneOf" and not disjoint(schemas)):
            raise _unsaid(combiner)
        yield from (self._rule_of(option) for option in schemas if option is not False)

    def _values(self, schema: JsonObject) -> Iterator[str]:
        if beside := sorted(schema.keys() & _SAID - {"type", "enum", "const"} - NUMBERS):
            raise _unsaid(beside[0])
        if {"enum", "const"} <= schema.keys() or "multipleOf" in schema:
            raise _unsaid("const" if "const" in schema else "multipleOf")
        values = [schema["const"]] if "const" in schema else schema["enum"]
        types, bounds = types_of(schema), Bounds.of(schema)
        fitting = [
            value
            for value in (values if isinstance(values, list) else [])
            if (not types or type_of(value) & types) and bounds.hold(value)
        ]
        if plain := [value for value in fitting if not _holds_big(value)]:
            yield self._plain({"enum": plain})
        if large := [value for value in fitting if isinstance(value, int) and _beyond(value)]:
            yield self._terminal(f"/{'|'.join(map(str, dict.fromkeys(large)))}/")
        for value in fitting:
            if isinstance(value, (list, dict)) and _holds_big(value):
                yield self._rule_of(_schema_of(value))

    def _typed(self, schema: JsonObject) -> Iterator[str]:
        """Yield alternatives by type: those with such an integer as rules, the others together as one schema."""
        kinds = types_of(schema) or set(_TYPES)
        kinds -= {"integer"} if "number" in kinds else set()
        left, words = set(kinds), NUMBERS | _OBJECTS | _ARRAYS
        if any(_beyond(schema.get(word)) for word in NUMBERS) and (numeric := kinds & {"integer", "number"}):
            if "multipleOf" in schema:
                raise _unsaid("multipleOf")
            left, words = left - numeric, words - NUMBERS
            bounds = Bounds.of(schema)
            if pattern := integers(bounds) if "integer" in numeric else numbers(bounds):
                yield self._terminal(f"/{pattern}/")
        if "object" in kinds and self._reach.within(schema, "properties", "additionalProperties"):
            left, words = left - {"object"}, words - _OBJECTS
            yield from self._object(schema)
        if "array" in kinds and self._reach.within(schema, "prefixItems", "items"):
            left, words = left - {"array"}, words - _ARRAYS
            yield from self._array(schema)
        if left:
            kept = {word: value for word, value in schema.items() if word in words | _STRINGS}
            yield self._plain({**kept, "type": sorted(left)})

    def _object(self, schema: JsonObject) -> Iterator[str]:
        """Yield an object: members in the schema's order, as the library writes them, and others after them."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ValueError("properties must be an object, and required a list")
        others = schema.get("additionalProperties", True)
        members = {**properties, **{str(name): others for name in required if name not in properties}}
        if any(members[str(name)] is False for name in required):
            raise ValueError("a name is required whose schema allows nothing")
        keys = {name: quoted(json.dumps(name, ensure_ascii=False)) for name in members}
        pairs = [
            (self._pair(keys[name], inner), name in required) for name, inner in members.items() if inner is not False
        ]
        more = ""
        if others is not False:
            other = self._terminal(f"/{_STRING}/" + (f" & ~({' | '.join(keys.values())})" if keys else ""))
            more = self._pair(other, others)
        yield from self._listed("{}", pairs, more)

    def _pair(self, key: str, schema: JsonValue) -> str:
        return self._rule(f'{key} {self._space}":" {self._space}{self._rule_of(schema)}')

    def _array(self, schema: JsonObject) -> Iterator[str]:
        first, items = schema.get("prefixItems", []), schema.get("items", True)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if isinstance(items, list):
            raise _unsaid("items")
        if not isinstance(first, list) or not isinstance(least, int) or not isinstance(most, (int, type(None))):
            raise ValueError("prefixItems must be a list, minItems and maxItems must be integers")
        first = first[:most]
        parts = [(self._rule_of(inner), at < least) for at, inner in enumerate(first)]
        left, needed = None if most is None else most - len(first), max(0, least - len(first))
        more = "" if items is False or left == 0 else self._rule_of(items)
        if needed and (not more or (left is not None and left < needed)):
            raise ValueError("minItems asks for more items than there may be")
        yield from self._listed("[]", parts, more, needed, left)

    def _listed(
        self, brackets: str, parts: list[tuple[str, bool]], more: str, least: int = 0, most: int | None = None
    ) -> Iterator[str]:
        """Yield two brackets with `parts` in them, each with whether it must be there, and then `more`, from `least`
        to `most` times. A member of an object may be left out; what follows an item that is left out of a list is, too.
        """
        begin, end, space = quoted(brackets[0]), quoted(brackets[1]), self._space
        comma = f'{space}"," {space}'
        tail = self._rule(_times(f"({comma}{more})", least, most) if more else '""')
        head = [f"{more} {_times(f'({comma}{more})', least - 1, most and most - 1)}"] if more else []
        for body, required in reversed(parts):
            leaving_out = head if brackets == "{}" and not required else []
            head = [f"{body} {tail}", *leaving_out]
            without = [] if required else [tail if brackets == "{}" else '""']
            tail = self._rule(f"{comma}{body} {tail}", *without)
        if head:
            yield f"{begin} {space}{self._rule(*head)} {space}{end}"
        if not least and not any(required for _, required in parts):
            yield f"{begin} {space}{end}"


def _times(body: str, least: int, most: int | None) -> str:
    """Return a body so many times. The library takes no repetition of none at all."""
    return '""' if most == 0 else f"{body}{{{max(0, least)},{'' if most is None else most}}}"


def _schema_of(value: JsonValue) -> JsonObject:
    """Return a schema of this list or object alone."""
    if isinstance(value, list):
        items = [{"const": inner} for inner in value]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    members = value if isinstance(value, dict) else {}
    properties = {name: {"const": inner} for name, inner in members.items()}
    return {"type": "object", "properties": properties, "required": list(members), "additionalProperties": False}


class _Reach:
    """What of a schema leads to an integer beyond 2**53, by itself or by its references."""

    def __init__(self, root: JsonObject) -> None:
        self._root = root
        self._refs: set[str] = set()
        """References to what leads there."""
        known: dict[str, JsonValue] = {}
        new = set(refs_in(root))
        while new:
            known |= {ref: self.target(ref) for ref in new}
            new = {ref for name in new for ref in refs_in(known[name])} - known.keys()
        while more := {ref for ref, schema in known.items() if ref not in self._refs and self.of(schema)}:
            self._refs |= more

    def of(self, schema: JsonValue) -> bool:
        return any(_has_big(inner) or inner.get("$ref") in self._refs for inner in schemas_in(schema))

    def within(self, schema: JsonObject, *words: str) -> bool:
        """Return whether what stands below some keywords leads there."""
        return self.of({word: schema[word] for word in words if word in schema})

    def target(self, ref: str) -> JsonValue:
        """Return what is referred to. Raises ValueError where that is not a place within the schema."""
        if ref != "#" and not ref.startswith("#/"):
            raise _unsaid(ref[:64])
        return target_of(self._root, ref)

    def closed(self, schema: JsonObject) -> JsonObject:
        """Return a schema that leads to no such integer with the definitions that it needs, and no others."""
        made = {word: value for word, value in schema.items() if word not in ("$defs", "definitions")}
        found: dict[str, dict[str, JsonValue]] = {}
        new = set(refs_in(made))
        while new:
            added: set[str] = set()
            for ref in new:
                word, _, name = ref.removeprefix("#/").partition("/")
                defined = self._root.get(word) if word in ("$defs", "definitions") else None
                name = unquote(name).replace("~1", "/").replace("~0", "~")
                if not isinstance(defined, dict) or name not in defined:
                    raise _unsaid(ref[:64])
                if name not in found.setdefault(word, {}):
                    found[word][name] = defined[name]
                    added |= {*refs_in(defined[name])}
            new = added
        return {**made, **found}


def quoted(text: str) -> str:
    """Return a literal of Lark."""
    return json.dumps(text, ensure_ascii=False)
