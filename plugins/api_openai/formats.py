"""`response_format` of chats and completions, and `text.format` of responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.constraints import AskedGrammar
from pegboard.toolkit.http.refusals import Refusal

_REMARKS = {"name": (str, "a string"), "description": (str, "a string"), "strict": (bool, "a boolean")}
"""What a format may say beside its schema. None of it changes an answer: a schema is always followed to the letter."""
_ROOTS = frozenset({"type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"})
"""Keywords that say what a schema describes; without any of them that is an object here."""


def asked_format(form: Mapping[str, Any], where: str, *, flat: bool = False) -> AskedGrammar | None:
    """Return the grammar that a format asks for, None for text. `where` is its place in the body; a `flat` one has what
    belongs to `json_schema` beside its type. A schema beside `json_object` is followed, as other servers do.

    Raises InvalidRequest, with the path, for what is malformed, and for keys that are not known and ask for something.
    """
    kind = form.get("type", "text")
    kinds = ("text", "json_object", "json_schema", *(() if flat else ("structural_tag",)))
    if kind not in kinds:
        where = f"{where}.type"
        raise InvalidRequest(f"{where} must be one of {', '.join(kinds)}, got {str(kind)[:64]!r}", param=where)
    if kind == "structural_tag":
        return AskedGrammar(where, kind, {name: value for name, value in form.items() if name != "type"})
    if kind == "json_schema" and not flat and (form.get("json_schema") is not None or form.get("schema") is None):
        _refuse_others(form, where, ("json_schema",))
        inner, where = form.get("json_schema"), f"{where}.json_schema"
        if not isinstance(inner, dict):
            raise InvalidRequest(f"{where} must be an object with name and schema", param=where)
        form = inner
    _refuse_others(form, where, ("schema",) if kind != "text" else ())
    for name, (type_, what) in _REMARKS.items():
        if form.get(name) is not None and not isinstance(form[name], type_):
            raise InvalidRequest(f"{where}.{name} must be {what}", param=f"{where}.{name}")
    schema = form.get("schema")
    if kind == "text":
        return None
    if kind == "json_schema" and schema is None:
        raise InvalidRequest(f"{where}.schema is missing", param=f"{where}.schema")
    if kind == "json_object" and schema in (None, {}):
        return AskedGrammar(where, kind, True)
    if kind == "json_object" and isinstance(schema, dict) and not schema.keys() & _ROOTS:
        schema = {"type": "object", **schema}
    return AskedGrammar(f"{where}.schema", "json_schema", schema)


def _refuse_others(form: Mapping[str, object], where: str, known: Sequence[str]) -> None:
    for name, value in form.items():
        if name not in ("type", *known, *_REMARKS) and Refusal().concerns(value):
            path = f"{where}.{name[:64]}"
            raise InvalidRequest(f"{path} is not supported by this server", param=path, code="unsupported")
