"""The room of large bodies, from their arrival to the end of their requests."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from pegboard.conformance.asgi import Exchange
from pegboard.plugins.http_guard.bodies import BodyGuard
from pegboard.toolkit.http.bodies import MOST_BODY, RequestModel, parse_body
from pegboard.toolkit.http.body_room import engine_has
from pegboard.toolkit.http.value_size import memory_of

LONG = 200_000


class Body(RequestModel):
    prompt: str | list[int] | list[str]
    note: Any = None
    """Something of which the engine knows nothing."""


class Stage:
    """An application behind the guard, and what its bodies hold: parsed, taken by the engine, and ended."""

    def __init__(self) -> None:
        self.guard = BodyGuard(self.app, 2**20, 2**26)
        self.held: list[int] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.guard({**scope, "extensions": {MOST_BODY: 2**24}}, receive, send)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await parse_body(Request(scope, receive), Body)
        self.note()
        engine_has(body.prompt if isinstance(body.prompt, list) and isinstance(body.prompt[0], str) else [body.prompt])
        self.note()
        await Response()(scope, receive, send)

    def note(self) -> None:
        self.held.append(self.guard._budget.held)


def held(body: Any, *, ascii_only: bool = False) -> list[int]:
    async def scene() -> list[int]:
        stage = Stage()
        data = json.dumps(body, ensure_ascii=ascii_only).encode()
        assert (await Exchange(stage, "POST", "/", data).end()).status == 200
        stage.note()
        return stage.held

    return asyncio.run(scene())


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize(
    "prompt",
    ["a" * LONG, "a" * LONG + "😀", "한국어" * LONG, [54321] * LONG, ["a" * LONG, "😀" * 1000, "b" * LONG]],
    ids=["letters", "an emoji", "hangul", "ids", "texts"],
)
def test_a_prompt_holds_room_until_the_engine_has_it(prompt: Any, ascii_only: bool) -> None:
    parsed, taken, ended = held({"prompt": prompt}, ascii_only=ascii_only)
    assert parsed >= LONG
    assert (taken, ended) == (0, 0)


def test_what_the_engine_does_not_know_of_holds_room_to_the_end() -> None:
    """It lives as long as its request, and nothing else would bound it."""
    note = {"deep": ["x" * LONG, "y" * LONG]}
    parsed, taken, ended = held({"prompt": "a" * LONG, "note": note})
    assert parsed > 3 * LONG
    assert parsed > taken > 1.9 * LONG
    assert ended == 0


def test_values_and_not_bytes_count_once_they_are_parsed() -> None:
    parsed, *_ = held({"prompt": "a" * LONG, "note": "😀", "ignored": "x" * LONG})
    assert LONG < parsed < 2 * LONG, "not four times as much, and not what is gone"


def test_memory_of_values() -> None:
    body = Body(prompt=[5] * LONG, note={"name": [{"a": "x" * LONG}, ("y" * LONG, 5, None)]})
    size = LONG * (8 + 32) + 2 * LONG
    assert size < memory_of(body) < size + 2000
    assert memory_of([1, "x" * LONG]) > LONG, "the first does not speak for the others"
