"""From Pegboard's kinds of grammar to what llguidance reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from llguidance import LLMatcher, regex_to_lark

from pegboard.core.interfaces.json_value import JsonObject, JsonValue
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar_llguidance.exact import ExactRules, needs_rules, quoted
from pegboard.toolkit.grammars import gbnf
from pegboard.toolkit.grammars.grammar import StructuralTag, parts_of, structural_tag_of
from pegboard.toolkit.grammars.json_schema import checked_schema, schema_of

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITESPACE = r"[\x20\x0A\x0D\x09]"

ANY_TEXT = r"/(.|\n)*/"


def translate(grammar: Grammar, *, max_whitespace: int | None, lenient: bool) -> str:
    """Return the grammar in llguidance's own form. Raises InvalidRequest for EBNF that is wrong; whether schemas and
    expressions are right is found out by building a matcher of them.
    """
    if grammar.kind == "any_of":
        return _union([translate(one, max_whitespace=max_whitespace, lenient=lenient) for one in parts_of(grammar)])
    json_options = _json_options(max_whitespace, lenient)
    if grammar.kind == "json_object":
        return LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=json_options)
    if grammar.kind == "json_schema":
        schema = _object(schema_of(grammar.source))
        if rules := _exact(schema, json_options, max_whitespace):
            return LLMatcher.grammar_from_lark("\n".join([f"start: {rules.start}", *rules.lines]) + "\n")
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=json_options)
    if grammar.kind == "regex":
        # \d, \w and \s are ASCII, as most users mean them and as other libraries have them.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.source, 'dws')}/")
    if grammar.kind == "ebnf":
        return LLMatcher.grammar_from_lark(lark_of(gbnf.unrolled(gbnf.parse(grammar.source))))
    tag = structural_tag_of(json.loads(grammar.source))
    return LLMatcher.grammar_from_lark(_structural(tag, json_options, max_whitespace))


def _exact(
    schema: JsonObject, json_options: JsonCompileOptions, max_whitespace: int | None, prefix: str = "s"
) -> ExactRules | None:
    """Return rules of a schema that the library alone would not follow to the letter; None for any other."""
    if not needs_rules(schema):
        return None
    most = "" if max_whitespace is None else max_whitespace
    whitespace = "" if max_whitespace == 0 else f"{WHITESPACE}{{1,{most}}}"
    try:
        return ExactRules(schema, json_options, whitespace, prefix)
    except ValueError:
        if json_options.get("lenient"):
            return None
        raise


def _union(texts: list[str]) -> str:
    """Grammars of the library's own form, each of which is the whole of one, as one that begins with any of them."""
    named = []
    for index, text in enumerate(texts):
        one = json.loads(text)["grammars"][0] if text.lstrip().startswith("{") else {"lark_grammar": text}
        named.append({**one, "name": f"part{index}"})
    start = " | ".join(f"@{one['name']}" for one in named)
    return json.dumps({"grammars": [{"name": "union", "lark_grammar": f"start: {start}"}, *named]})


def _json_options(max_whitespace: int | None, lenient: bool) -> JsonCompileOptions:
    options: JsonCompileOptions = {"lenient": lenient}
    if max_whitespace == 0:
        options["whitespace_flexible"] = False
    elif max_whitespace is not None:
        options["whitespace_pattern"] = f"{WHITESPACE}{{1,{max_whitespace}}}"
    return options


def lark_of(rules: gbnf.Rules) -> str:
    """GBNF rules as Lark, with the same meaning.

    In Lark a terminal is matched by a lexer that takes as much as it can get, so ``[a-z]+ "x"`` would never be through.
    Where no rule leads to itself, the whole grammar is therefore one terminal. Where one does, everything is made of
    terminals of one character, which leave a lexer nothing to be greedy about.
    """
    names = _reachable(rules)
    if gbnf.START not in gbnf.recursive(rules):
        called = {name: f"T{index}" for index, name in enumerate(names)}
        lines = [f"{called[name]}: {_lark(rules[name], called, whole=True)}" for name in names]
        return "start: T0\n" + "\n".join(lines) + "\n"
    called = {name: f"r{index}" for index, name in enumerate(names)}
    lines = [f"{called[name]}: {_lark(rules[name], called, whole=False)}" for name in names]
    return "start: r0\n" + "\n".join(lines) + "\n"


def _reachable(rules: gbnf.Rules) -> list[str]:
    found = [gbnf.START]
    seen = set(found)
    for name in found:
        for other in gbnf.references(rules[name]):
            if other not in seen:
                seen.add(other)
                found.append(other)
    return found


def _lark(node: gbnf.Node, called: Mapping[str, str], *, whole: bool) -> str:
    if isinstance(node, gbnf.Literal):
        if whole or len(node.text) < 2:
            return json.dumps(node.text, ensure_ascii=False)
        return f"({' '.join(json.dumps(char, ensure_ascii=False) for char in node.text)})"
    if isinstance(node, gbnf.Chars):
        spans = "".join(_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in node.spans)
        return f"/[{'^' if node.negated else ''}{spans}]/"
    if isinstance(node, gbnf.Ref):
        return called[node.name]
    if isinstance(node, gbnf.Repeat):
        if node.most == 0:
            return '""'  # the library takes no repetition of none at all
        return f"({_lark(node.node, called, whole=whole)}){gbnf.times(node)}"
    if isinstance(node, gbnf.Sequence) and not node.nodes:
        return '""'
    separator = " " if isinstance(node, gbnf.Sequence) else " | "
    return f"({separator.join(_lark(one, called, whole=whole) for one in node.nodes)})"


def _code(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:X}}}"


def _structural(tag: StructuralTag, json_options: JsonCompileOptions, max_whitespace: int | None) -> str:
    """Free text with structures in it: text runs up to a trigger, and then one of its structures follows. Or, with a
    separator, structures alone.
    """
    rules: list[str] = []
    bodies: list[_Body] = []
    for index, structure in enumerate(tag["structures"]):
        schema = _object(checked_schema(structure["schema"], "structural_tag"))
        if exact := _exact(schema, json_options, max_whitespace, f"s{index}"):
            rules += exact.lines
        content = exact.start if exact else f"%json {json.dumps({**schema, 'x-guidance': json_options})}"
        bodies.append(_Body(structure["begin"], content, structure["end"]))
    lines = _separated(tag, bodies) if "separator" in tag else _triggered(tag, bodies)
    return "\n".join([*lines, *rules]) + "\n"


class _Body(NamedTuple):
    """One structure: JSON between two texts, `content` being Lark."""

    begin: str
    content: str
    end: str

    def after(self, trigger: str = "") -> str:
        """Return what follows a trigger that has been read."""
        begin = self.begin[len(trigger) :]
        return " ".join([*([quoted(begin)] if begin else []), self.content, *([quoted(self.end)] if self.end else [])])


def _triggered(tag: StructuralTag, bodies: list[_Body]) -> list[str]:
    triggers = tag["triggers"]
    lines: list[str] = []
    options: list[str] = []
    for index, trigger in enumerate(triggers):
        own = [body for body in bodies if _trigger_of(body.begin, triggers) == trigger]
        if own:
            options.append(f"tag{index}")
            lines.append(f"head{index}[lazy]: TEXT {quoted(trigger)}")
            lines.append(f"tag{index}: head{index} ({' | '.join(body.after(trigger) for body in own)})")
    first = " | ".join(body.after() for body in bodies)
    return [*_start(options, first, tag), f"TEXT: {ANY_TEXT}", *lines]


def _separated(tag: StructuralTag, bodies: list[_Body]) -> list[str]:
    """Return one terminal for each text in between, so that a lexer always knows where it is."""
    begin, between, end = (quoted(tag[key]) if tag.get(key) else "" for key in ("begin", "separator", "end"))
    trailing = f"{between}?" if between and tag.get("trailing_separator") else ""
    many = "one" if tag.get("stop_after_first") else f"one ({between} one)* {trailing}"
    start = f"start: {begin} {many if tag.get('at_least_one') else f'({many})?'} {end}"
    return [start, f"one: {' | '.join(body.after() for body in bodies)}"]


def _start(options: list[str], first: str, tag: StructuralTag) -> list[str]:
    any_tag = f"({' | '.join(options)})"
    if tag.get("at_least_one"):
        more = "" if tag.get("stop_after_first") else f" {any_tag}* rest"
        return [f"start: first{more}", f"first: {first}", *([] if not more else ["rest: TEXT"])]
    return ["start: one | rest" if tag.get("stop_after_first") else "start: one* rest", f"one: {any_tag}", "rest: TEXT"]


def _trigger_of(begin: str, triggers: list[str]) -> str:
    """Return the one that is seen first while the text is read."""
    return min((one for one in triggers if begin.startswith(one)), key=len)


def _object(schema: JsonValue) -> dict[str, JsonValue]:
    return dict(schema) if isinstance(schema, dict) else {}


def explain(error: str) -> str:
    """Return an error of llguidance without what is meant for its developers."""
    return error.partition("\n<")[0].strip()
