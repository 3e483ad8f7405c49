"""EBNF of calls whose arguments are not JSON: Python's and Gemma's literals, and values in tags.

The schemas of arguments hold as far as their types go (strings, numbers, booleans, enums of those, lists and objects of
anything); required ones come in the schema's order, each of the others may follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pegboard.core.interfaces.json_value import JsonValue
from pegboard.plugins.parsers_tools.grammars import parameters_of, properties_of
from pegboard.toolkit.parsing.output_parser import EarlierCall, ToolFunction

_PYTHON_RULES = r"""
value ::= string | number | boolean | "None" | list | dict
list ::= "[" (value (", " value)*)? "]"
dict ::= "{" (string ": " value (", " string ": " value)*)? "}"
string ::= "\"" ([^"\\\x00-\x1f] | escape)* "\"" | "'" ([^'\\\x00-\x1f] | escape)* "'"
escape ::= "\\" ["'\\nrt]
integer ::= "-"? ("0" | [1-9] [0-9]{0,19})
number ::= integer ("." [0-9]{1,15})?
boolean ::= "True" | "False"
"""

GEMMA_RULES = r"""
value ::= string | number | boolean | "null" | list | dict
list ::= "[" (value ("," value)*)? "]"
dict ::= "{" (key ":" value ("," key ":" value)*)? "}"
key ::= [A-Za-z_] [A-Za-z0-9_.-]* | string
string ::= "<|\"|>" ([^<] | "<"+ [^<|])* "<|\"|>"
integer ::= "-"? ("0" | [1-9] [0-9]{0,19})
number ::= integer ("." [0-9]{1,15})?
boolean ::= "true" | "false"
"""

_TAG_RULES = r"""
value ::= string | number | boolean | list | dict
list ::= "[" (json (", " json)*)? "]"
dict ::= "{" (quoted ": " json (", " quoted ": " json)*)? "}"
json ::= quoted | number | boolean | "null" | list | dict
quoted ::= "\"" ([^"\\<\x00-\x1f] | "\\" ["\\nrt])* "\""
string ::= ([^<] | "<" [^/<])*
integer ::= "-"? ("0" | [1-9] [0-9]{0,19})
number ::= integer ("." [0-9]{1,15})?
boolean ::= "true" | "false"
"""


@dataclass(frozen=True)
class LiteralForm:
    """How calls with literals are written: what stands before, between and after them, around the arguments of each,
    with the function's name for ``{name}``, and before an argument's value, with its name; `rules` are those of values,
    and `literal` writes one.
    """

    first: str = ""
    between: str = ""
    last: str = ""
    call: str = "{name}("
    call_end: str = ")"
    key: str = "{name}="
    comma: str = ", "
    rules: str = _PYTHON_RULES
    literal: Callable[[JsonValue], str] = repr
    key_text: Callable[[str], str] = str

    def argument(self, name: str, schema: JsonValue) -> tuple[str, str]:
        """Return what stands before an argument's value, and the value's rule."""
        kind = _kind(schema)
        if isinstance(kind, list):
            kind = f"({' | '.join(_text(self.literal(one)) for one in kind)})"
        return self.key.replace("{name}", self.key_text(name)), kind


def literal_calls(functions: Sequence[ToolFunction], form: LiteralForm, *, parallel: bool) -> str:
    """Return a grammar of calls of these functions in such a form."""
    more = f"({_text(form.between)} call)*" if parallel else ""
    lines = [f"root ::= {_text(form.first)} call {more} {_text(form.last)}"]
    lines.append(f"call ::= {' | '.join(f'call{i}' for i in range(len(functions)))}")
    for i, one in enumerate(functions):
        required, others = ([form.argument(*pair) for pair in part] for part in _arguments(one))
        first = " ".join(f"{_text(form.comma * bool(j) + head)} {kind}" for j, (head, kind) in enumerate(required))
        more, *rules = _optional(others, started=bool(required), index=i, comma=form.comma)
        opening = form.call.replace("{name}", one["name"])
        lines.append(f"call{i} ::= {_text(opening)} {first} {more} {_text(form.call_end)}")
        lines += rules
    return "\n".join(lines) + form.rules


@dataclass(frozen=True)
class TagForm:
    """How calls in tags are written. ``{name}`` stands for the function's name in `call`, and for the parameter's in
    `text`, which comes before a string, and in `json`, before any other value.
    """

    call: str
    call_end: str
    text: str
    json: str
    value_end: str
    first: str = ""
    between: str = "\n"
    last: str = ""

    def write(self, calls: Sequence[EarlierCall]) -> str:
        """Return calls in this form."""
        if not calls:
            return ""
        return self.first + self.between.join(map(self._call, calls)) + self.last

    def _call(self, call: EarlierCall) -> str:
        values = "".join(
            self._opening(key, isinstance(value, str))
            + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            + self.value_end
            for key, value in call["arguments"].items()
        )
        return self.call.replace("{name}", call["name"]) + values + self.call_end

    def _opening(self, name: str, text: bool) -> str:
        return (self.text if text else self.json).replace("{name}", name)

    def argument(self, name: str, schema: JsonValue) -> str:
        """Return the rule of an argument."""
        text, other = (_text(self._opening(name, text)) for text in (True, False))
        kind = _kind(schema)
        if isinstance(kind, list):
            words = (
                f"{text} {_text(one)}" if isinstance(one, str) else f"{other} {_text(json.dumps(one))}" for one in kind
            )
            value = f"({' | '.join(words)})"
        elif kind == "value" and text != other:
            value = f"({text} string | {other} json)"
        else:
            value = f"{text if kind == 'string' else other} {kind}"
        return f"{value} {_text(self.value_end)}"


def tagged_calls(functions: Sequence[ToolFunction], form: TagForm, *, parallel: bool) -> str:
    """Return a grammar of calls of these functions in such a form."""
    more = f"({_text(form.between)} call)*" if parallel else ""
    if parallel and form.between and not form.last:
        # Also after the last one, as in `Around.trailing`.
        more += f" {_text(form.between)}?"
    lines = [f"root ::= {_text(form.first)} call {more} {_text(form.last)}"]
    lines.append(f"call ::= {' | '.join(f'call{i}' for i in range(len(functions)))}")
    for i, one in enumerate(functions):
        required, others = _arguments(one)
        parts = [_text(form.call.replace("{name}", one["name"]))]
        parts += [form.argument(name, kind) for name, kind in required]
        parts += [f"({form.argument(name, kind)})?" for name, kind in others]
        lines.append(f"call{i} ::= {' '.join(parts)} {_text(form.call_end)}")
    return "\n".join(lines) + _TAG_RULES


def _arguments(function: ToolFunction) -> tuple[list[tuple[str, JsonValue]], list[tuple[str, JsonValue]]]:
    """Return names and schemas of the arguments that must be there, and of those that may."""
    properties, needed = properties_of(function), parameters_of(function).get("required")
    names = [name for name in needed if isinstance(name, str)] if isinstance(needed, list) else []
    required = [(name, properties.get(name, True)) for name in dict.fromkeys(names)]
    return required, [(name, one) for name, one in properties.items() if name not in names]


def _optional(pairs: Sequence[tuple[str, str]], *, started: bool, index: int, comma: str) -> list[str]:
    """Return what each of `pairs` may add, in their order; commas stand between what is there. The first entry belongs
    into the rule, the others are rules.
    """
    if not pairs:
        return [""]
    if started:
        return [" ".join(f"({_text(comma + head)} {kind})?" for head, kind in pairs)]
    # Whichever comes first has no comma before it.
    rules = []
    for j, (head, kind) in enumerate(pairs):
        rest = " ".join(f"({_text(comma + other)} {its})?" for other, its in pairs[j + 1 :])
        rules.append(f"first{index}x{j} ::= {_text(head)} {kind} {rest}")
    return [f"({' | '.join(f'first{index}x{j}' for j in range(len(pairs)))})?", *rules]


def _kind(schema: JsonValue) -> str | list[JsonValue]:
    """Return the rule of a schema's values, or the values themselves."""
    if not isinstance(schema, Mapping):
        return "value"
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and all(one is None or isinstance(one, (str, int, float)) for one in values):
        return values
    rules = {"array": "list", "object": "dict", "string": "string", "integer": "integer", "number": "number"}
    return {**rules, "boolean": "boolean"}.get(str(schema.get("type")), "value")


def _text(text: str) -> str:
    """Return a literal of GBNF."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'
