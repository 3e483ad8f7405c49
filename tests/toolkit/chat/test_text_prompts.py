"""Conversations without media make the prompts that they made before there were any, byte for byte."""

from __future__ import annotations

import asyncio
import json

from pegboard.conformance.rig.fake_media import fake_processor
from tests.toolkit.chat.text_corpus import DIGESTS, Case, cases, digest, outcomes

CASES = list(cases())


def unlike(some: list[Case], found: list[object], known: dict[int, str]) -> list[tuple[Case, object]]:
    """The cases whose outcome is another one."""
    numbers = [CASES.index(one) for one in some]
    return [(one, now) for one, now, number in zip(some, found, numbers, strict=True) if digest(now) != known[number]]


def test_models_without_media_are_asked_the_same() -> None:
    known = dict(enumerate(json.loads(DIGESTS.read_text("utf-8"))))
    assert len(known) == len(CASES) > 250
    assert unlike(CASES, asyncio.run(outcomes(CASES)), known) == []


def test_models_with_media_are_asked_the_same_texts() -> None:
    """Also where a text spells one of their tokens: then the prompt says so beside the text. /tokenize tells the tokens
    of no such text, and a template that reads parts alone is given parts now.
    """
    known = dict(enumerate(json.loads(DIGESTS.read_text("utf-8"))))
    some = [
        one
        for one in CASES
        if not one.media and one.template != "only parts" and not (one.spells and one.path == "/v1/tokenize")
    ]
    assert sum(one.spells for one in some) > 40
    assert unlike(some, asyncio.run(outcomes(some, media=fake_processor())), known) == []
