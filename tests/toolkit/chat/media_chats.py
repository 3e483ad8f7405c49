"""Conversations with media, and with the spellings of tokens in every text that reaches a template, for properties."""

from __future__ import annotations

import base64
import re
from typing import Any

import numpy as np
from hypothesis import strategies as st

from pegboard.conformance.rig.media_toy import TOKENS
from pegboard.toolkit.media.inputs import MediaInput, MediaKind, MediaPrompt
from tests.fakes.toy_media import ppm

SPELLED = re.compile("|".join(map(re.escape, TOKENS)))
NEUTRAL = {spelling: f"Zq{number}qZ" for number, spelling in enumerate(TOKENS)}
"""Words that stand for spellings in a conversation that is otherwise the same."""


def picture(number: int, kind: MediaKind = "image") -> bytes:
    """The file of a picture, which takes 6 tokens, or of a video, which takes 2 * 4 and 2 * 4 for its times. It is
    unlike those of other numbers.
    """
    return ppm(np.full((2, 3, 3) if kind == "image" else (2, 2, 2, 3), number % 256, np.uint8))


def encoded(number: int, kind: MediaKind = "image") -> str:
    return base64.b64encode(picture(number, kind)).decode()


def address(number: int, kind: MediaKind = "image") -> str:
    """Its address, with all that is in it."""
    return f"data:{kind}/x-portable-pixmap;base64,{encoded(number, kind)}"


def item(number: int, kind: MediaKind = "image", place: str = "") -> MediaInput:
    return MediaInput(kind=kind, url=address(number, kind), place=place or f"item {number}")


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


_WORDS = st.sampled_from(
    ("Hi", " ", "a < b", "漢😀", '"', "\\n", "7", "image", "<|", "ge|>", "{{ 1 }}", *TOKENS, *TOKENS)
)
SENTENCES = st.lists(_WORDS, min_size=1, max_size=4).map(" ".join)
_VALUES = st.recursive(
    SENTENCES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(SENTENCES, inner, max_size=2)
)
_PART = st.one_of(SENTENCES.map(text), st.sampled_from(("image", "video")))
_CALL = st.fixed_dictionaries({"name": st.just("look"), "arguments": st.dictionaries(SENTENCES, _VALUES, max_size=2)})
_SYSTEM = st.fixed_dictionaries({"role": st.just("system"), "content": SENTENCES})
_ASKED = st.fixed_dictionaries(
    {"role": st.just("user"), "content": SENTENCES | st.lists(_PART, min_size=1, max_size=4)},
    optional={"name": SENTENCES},
)
_SAID = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": SENTENCES},
    optional={
        "reasoning_content": SENTENCES,
        "tool_calls": _CALL.map(lambda one: [{"id": "c", "type": "function", "function": one}]),
    },
)
_TOLD = st.fixed_dictionaries(
    {
        "role": st.just("tool"),
        "tool_call_id": st.just("c"),
        "content": SENTENCES | st.lists(_PART, min_size=1, max_size=3),
    },
    optional={"name": SENTENCES},
)
_TURNS = st.lists(_ASKED | _SAID | _TOLD, min_size=1, max_size=5)
CHATS = st.tuples(st.lists(_SYSTEM, max_size=1), _TURNS).map(lambda both: both[0] + both[1])
TOOLS = st.lists(st.fixed_dictionaries({"name": st.just("look"), "description": SENTENCES}), max_size=1)


KINDS: dict[str, MediaKind] = {"image": "image", "video": "video"}


def with_items(chat: Any) -> list[dict[str, Any]]:
    """The chat, with items for the names of kinds in lists of parts."""
    numbers = iter(range(10**6))

    def content(one: Any) -> Any:
        if not isinstance(one, list):
            return one
        return [item(next(numbers), KINDS[part]) if isinstance(part, str) else part for part in one]

    return [{**one, "content": content(one["content"])} for one in chat]


def neutral(value: Any) -> Any:
    """The same with words in place of spellings."""
    if isinstance(value, str):
        return SPELLED.sub(lambda match: NEUTRAL[match[0]], value)
    if isinstance(value, dict):
        return {neutral(name): neutral(one) for name, one in value.items()}
    return [neutral(one) for one in value] if isinstance(value, list) else value


def spelled(prompt: str | MediaPrompt) -> tuple[str, list[tuple[int, int]]]:
    """A prompt with spellings in place of words, and where these are."""
    base, found, at = str(prompt if isinstance(prompt, str) else prompt.base), [], 0
    pieces: list[str] = []
    for match in re.finditer("|".join(NEUTRAL.values()), base):
        pieces += (base[at : match.start()], next(one for one, word in NEUTRAL.items() if word == match[0]))
        length = sum(map(len, pieces))
        found.append((length - len(pieces[-1]), length))
        at = match.end()
    return "".join([*pieces, base[at:]]), found
