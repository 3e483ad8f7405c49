"""How a chat template treats contents, found out by rendering a short conversation with it."""

from __future__ import annotations

import functools
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.chat.chat_template import ChatTemplate
from pegboard.toolkit.chat.provenance import Spellings, counted

_KNOWN = 32
"""Templates, each with one kind of media, of which it is remembered."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a template reads contents: as texts, as lists of parts, or as both. `made` counts the reserved spellings that
    it writes for one item of media: none where it has no place for it, None where that could not be found out.
    """

    texts: bool
    parts: bool
    made: Counter[str] | None


def reading_of(
    template: ChatTemplate, part: Mapping[str, object], reserved: Sequence[str], tokens: Mapping[str, str]
) -> Reading:
    """Return how `template` reads contents with this `part`, which stands for an item. `tokens` are the special tokens
    that it reads by name. What was found out is remembered.
    """
    return _reading(template, msgspec.json.encode(part), tuple(reserved), tuple(sorted(tokens.items())))


@functools.lru_cache(_KNOWN)
def _reading(
    template: ChatTemplate, encoded: bytes, reserved: tuple[str, ...], tokens: tuple[tuple[str, str], ...]
) -> Reading:
    part: dict[str, object] = msgspec.json.decode(encoded)
    mark = secrets.token_hex(8)
    text = {"type": "text", "text": mark}

    def rendered(content: object) -> str | None:
        try:
            return template.render([{"role": "user", "content": content}], variables=dict(tokens))
        except InvalidRequest:
            return None

    plain, without, whole = rendered(mark), rendered([text]), rendered([text, part])
    texts = plain is not None and mark in plain
    # What prints a list shows the names of its keys.
    parts = without is not None and mark in without and repr(text) not in without
    if whole is None or without is None or not parts:
        return Reading(texts, parts, Counter() if texts else None)
    spellings = Spellings(reserved)
    made = counted(spellings.find(whole)) - counted(spellings.find(without))
    return Reading(texts, parts, Counter() if repr(part) in whole else made)
