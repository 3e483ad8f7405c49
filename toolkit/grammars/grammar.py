"""For APIs: the grammar that a request asks for, from any of its fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal, Required, TypedDict

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.json_value import JsonObject, JsonValue
from pegboard.core.interfaces.sampling import Grammar, GrammarKind
from pegboard.toolkit.parsing.json_weight import JsonTexts

MAX_STRUCTURES = 1024
"""Most structures of a structural tag, and most triggers."""
MAX_TAG = 4096
"""Most characters of what begins a structure, and of what ends it: nothing in them is left to choose."""

_PARTS: tuple[GrammarKind, ...] = ("json_schema", "json_object", "regex", "ebnf", "structural_tag")

_TagFlag = Literal["at_least_one", "stop_after_first", "trailing_separator"]
_TagText = Literal["separator", "begin", "end"]
_TAG_FLAGS: tuple[_TagFlag, ...] = ("at_least_one", "stop_after_first")
_TAG_TEXTS: tuple[_TagText, ...] = ("separator", "begin", "end")


class Structure(TypedDict):
    """One structure of a structural tag: JSON that satisfies `schema`, between two texts."""

    begin: str
    schema: JsonValue
    end: str


class StructuralTag(TypedDict, total=False):
    """Free text with structures in it, or structures alone: what the source of such a `Grammar` is as JSON.

    With `triggers` the text is free, and from a trigger on one of the structures has to follow. With `at_least_one` the
    output begins with a structure, without a trigger; with `stop_after_first` it ends after one; both are false by
    default. With a `separator` in place of triggers there is no free text: the structures follow each other with the
    separator between them, all of it after `begin` and before `end` ("" unless given), and then the output ends; with
    `trailing_separator` one may stand after the last one, too, so that a model that has begun to go on may still end.
    """

    structures: Required[list[Structure]]
    triggers: list[str]
    separator: str
    begin: str
    end: str
    at_least_one: bool
    stop_after_first: bool
    trailing_separator: bool


def grammar_of(
    *,
    json_schema: JsonValue = None,
    json_object: bool = False,
    regex: JsonValue = None,
    ebnf: JsonValue = None,
    structural_tag: JsonValue = None,
    names: Mapping[str, str] | None = None,
) -> Grammar | None:
    """Return the grammar of a request, or None where it has none. Whatever is None was not given.

    `json_schema` is a schema (an object, or true), or its JSON text; `structural_tag` an object or its JSON text, in
    the form of `StructuralTag` or in one of those that others use: with a `type` beside it, or ``{"format": {"type":
    "triggered_tags", "triggers": [...], "tags": [...]}}``. Schemas come out as compact JSON with keys in their order,
    which is the order in which they are written. `names` has what a kind is called in the body where that differs.

    Raises InvalidRequest, naming the field, for more than one, for a wrong type, for an empty one and for what is no
    JSON. Whether the grammar itself makes sense is found out when it is compiled.
    """
    called: dict[GrammarKind, str] = {kind: (names or {}).get(kind, kind) for kind in _PARTS}
    values: dict[GrammarKind, JsonValue] = {
        "json_schema": json_schema,
        "json_object": json_object or None,
        "regex": regex,
        "ebnf": ebnf,
        "structural_tag": structural_tag,
    }
    given = [kind for kind, value in values.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        fields = " and ".join(dict.fromkeys(called[kind] for kind in given))
        raise InvalidRequest(f"one grammar per request: {fields} exclude each other", param=called[given[1]])
    kind = given[0]
    return _read(kind, values[kind], called[kind])


def _read(kind: GrammarKind, value: JsonValue, name: str) -> Grammar:
    """Check and spell one grammar, which is called `name` in the body. Raises InvalidRequest as `grammar_of` says."""
    if kind == "json_object":
        return Grammar("json_object")
    texts = JsonTexts()
    if kind == "json_schema":
        schema = _parsed(value, name, texts)
        if not isinstance(schema, (dict, bool)):
            raise InvalidRequest(f"{name} must be a JSON schema: an object, or true", param=name)
        if schema is False:
            raise InvalidRequest(f"{name}: the schema false allows no answer at all", param=name)
        return Grammar(kind, _text_of(schema, name))
    if kind == "structural_tag":
        return Grammar(kind, _text_of(structural_tag_of(_parsed(value, name, texts), name, texts), name))
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} must be a string that is not empty", param=name)
    _encodable(value, name)
    return Grammar(kind, value)


def any_of(*grammars: Grammar) -> Grammar:
    """Return what one of these grammars allows."""
    parts = [{"kind": one.kind, "source": one.source} for one in grammars]
    return Grammar("any_of", json.dumps(parts, ensure_ascii=False))


def parts_of(grammar: Grammar) -> tuple[Grammar, ...]:
    """Return the grammars that `any_of` was made of; of any other kind the grammar itself. Raises InvalidRequest for
    what is none.
    """
    if grammar.kind != "any_of":
        return (grammar,)
    try:
        parts = tuple(Grammar(one["kind"], one["source"]) for one in json.loads(grammar.source))
    except (ValueError, RecursionError, TypeError, KeyError):
        parts = ()
    if not parts or any(one.kind not in _PARTS or not isinstance(one.source, str) for one in parts):
        raise InvalidRequest("any_of: it must be a list of grammars of the other kinds, not empty", param="any_of")
    return parts


def structural_tag_of(value: JsonValue, name: str = "structural_tag", texts: JsonTexts | None = None) -> StructuralTag:
    """Return a structural tag in the form of `StructuralTag`, from that form or from one of those that others use (see
    `grammar_of`). Raises InvalidRequest, naming the place below `name`. `texts` are those of the request so far.
    """
    texts = texts or JsonTexts()
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", param=name)
    if "format" in value:
        value, name = _tags(value["format"], f"{name}.format"), f"{name}.format"
    alone = "separator" in value
    flags: tuple[_TagFlag, ...] = (*_TAG_FLAGS, "trailing_separator") if alone else _TAG_FLAGS
    unknown = sorted(value.keys() - {"type", "structures", *(_TAG_TEXTS if alone else ["triggers"]), *flags})
    if unknown:
        raise InvalidRequest(f"{name}: unknown key {unknown[0]!r}", param=f"{name}.{unknown[0]}")
    structures = [
        _structure(f"{name}.structures.{i}", one, texts) for i, one in enumerate(_list(value, "structures", name))
    ]
    tag: StructuralTag = {"structures": structures}
    if alone:
        for key in _TAG_TEXTS:
            if key in value:
                tag[key] = _tag_text(value[key], f"{name}.{key}")
    else:
        tag["triggers"] = _triggers(value, name, structures)
    for flag in flags:
        if not isinstance(value.get(flag, False), bool):
            raise InvalidRequest(f"{name}.{flag} must be true or false", param=f"{name}.{flag}")
        if value.get(flag):
            tag[flag] = True
    return tag


def _triggers(value: JsonObject, name: str, structures: Sequence[Structure]) -> list[str]:
    triggers: list[str] = []
    for i, trigger in enumerate(_list(value, "triggers", name)):
        if not isinstance(trigger, str) or not trigger:
            raise InvalidRequest(
                f"{name}.triggers.{i} must be a string that is not empty", param=f"{name}.triggers.{i}"
            )
        triggers.append(trigger)
    for i, one in enumerate(structures):
        if not any(one["begin"].startswith(trigger) for trigger in triggers):
            where = f"{name}.structures.{i}.begin"
            raise InvalidRequest(f"{where}: {one['begin']!r} starts with none of the triggers", param=where)
    return triggers


def _tag_text(value: JsonValue, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string", param=where)
    if len(value) > MAX_TAG:
        raise InvalidRequest(f"{where} may have at most {MAX_TAG} characters, got {len(value)}", param=where)
    return value


def _structure(name: str, value: JsonValue, texts: JsonTexts) -> Structure:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", param=name)
    begin, end, schema = value.get("begin"), value.get("end"), value.get("schema", True)
    if not isinstance(begin, str) or not begin:
        raise InvalidRequest(f"{name}.begin must be a string that is not empty", param=f"{name}.begin")
    begin, end = _tag_text(begin, f"{name}.begin"), _tag_text(end, f"{name}.end")
    schema = _parsed(schema, f"{name}.schema", texts)
    if not isinstance(schema, (dict, bool)) or schema is False:
        raise InvalidRequest(f"{name}.schema must be a JSON schema: an object, or true", param=f"{name}.schema")
    return {"begin": begin, "schema": schema, "end": end}


def _tags(value: JsonValue, name: str) -> dict[str, JsonValue]:
    """Return the form with `format`, of which tags around JSON schemas are understood: triggered ones, or separated
    ones.
    """
    value = value if isinstance(value, dict) else {}
    kind = value.get("type")
    if kind not in ("triggered_tags", "tags_with_separator"):
        raise InvalidRequest(
            f"{name}: {str(kind)[:64]!r} is not supported, triggered_tags and tags_with_separator are",
            param=f"{name}.type",
            code="unsupported",
        )
    structures = []
    for i, tag in enumerate(_list(value, "tags", name)):
        tag = tag if isinstance(tag, dict) else {}
        content = tag.get("content")
        if not isinstance(content, dict) or content.get("type") != "json_schema" or "json_schema" not in content:
            where = f"{name}.tags.{i}.content"
            text = f'{where}: only {{"type": "json_schema", "json_schema": ...}} is supported'
            raise InvalidRequest(text, param=where, code="unsupported")
        structures.append({"begin": tag.get("begin"), "schema": content["json_schema"], "end": tag.get("end")})
    flags: dict[str, JsonValue] = {flag: value[flag] for flag in _TAG_FLAGS if flag in value}
    between = "triggers" if kind == "triggered_tags" else "separator"
    return {"structures": structures, between: value.get(between), **flags}


def _list(value: JsonObject, key: str, name: str) -> list[JsonValue]:
    items = value.get(key)
    if not isinstance(items, list) or not items:
        raise InvalidRequest(f"{name}.{key} must be a list that is not empty", param=f"{name}.{key}")
    if len(items) > MAX_STRUCTURES:
        raise InvalidRequest(f"{name}.{key} may have at most {MAX_STRUCTURES} entries", param=f"{name}.{key}")
    return items


def _parsed(value: JsonValue, name: str, texts: JsonTexts) -> JsonValue:
    """Return what JSON text says; anything else is that already."""
    if not isinstance(value, str):
        return value
    try:
        return texts.parse(value, name, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not valid JSON: {_why(error)}", param=name) from None


def _no_constant(text: str) -> JsonValue:
    raise ValueError(f"{text} is not a JSON value")


def _text_of(value: object, name: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not valid JSON: {_why(error)}", param=name) from None
    _encodable(text, name)
    return text


def _encodable(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} holds lone surrogates, which are not valid Unicode", param=name) from None


def _why(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
