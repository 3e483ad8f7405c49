"""Grammars of each kind, with texts that follow them and texts that do not, and what is not a grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from pegboard.core.interfaces.sampling import Grammar, GrammarKind
from pegboard.toolkit.grammars.grammar import any_of

WIDTH = 352
"""Of the logits: more than the tokenizer's 320 tokens, as with models whose vocabulary is padded."""

EOS = 2
SPECIAL = (0, 1)
LETTER = 68
"""The token `a`."""

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


PERSON = {
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
        schema(PERSON),
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
        any_of(alone(at_least_one=True), schema(PERSON)),
        ["<f=a>1</f>", '<f=a>1</f>, <f=bc>"x"!', '{"name": "Ann", "age": 7}'],
        ["", "hi", '<f=a>1</f>{"name": "Ann", "age": 7}', '{"name": "Ann"}', '{"name": "Ann", "age": 7}<f=a>1</f>'],
    ),
    # Both begin alike, and part where a value does.
    Case(
        any_of(schema(_CALL), schema(PERSON)),
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
