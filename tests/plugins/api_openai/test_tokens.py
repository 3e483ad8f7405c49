"""What texts as tokens and tokens as texts may cost."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.core.server.client import AsyncEngineClient
from pegboard.plugins.api_openai import tokens
from pegboard.toolkit.http.budget import BudgetLimits
from tests.plugins.api_openai import asking

LETTERS = "n" * 81
LONGEST = 5
"""The id of the token with these letters."""


class Counting(FakeTokenizer):
    """Has one long token, and counts how often it is asked on the loop."""

    on_loop = 0

    def id_to_token(self, token_id: int) -> str | None:
        return LETTERS if token_id == LONGEST else super().id_to_token(token_id)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        try:
            asyncio.get_running_loop()
            self.on_loop += 1
        except RuntimeError:
            pass
        text = super().decode(ids, skip_special_tokens=skip_special_tokens)
        return text.replace(chr(LONGEST), LETTERS)


def exchange(path: str, body: Any, tokenizer: FakeTokenizer | None = None, **limits: int) -> tuple[Exchange, Any, int]:
    """An answer of an engine that keeps accounts, the engine, and the most memory that all took."""

    async def scene() -> tuple[Exchange, Any, int]:
        client = AsyncEngineClient(FakeEngineClient().info, tokenizer or Counting(), limits=BudgetLimits(**limits))
        app = asking.make_app(client)  # type: ignore[arg-type]  # it is all that these routes need
        tracemalloc.start()
        try:
            return await call(app, "POST", path, body), client, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return asyncio.run(scene())


def error_of(done: Exchange) -> tuple[int | None, str]:
    return done.status, done.json()["error"]["code"]


def test_short_ids_of_long_tokens_are_priced() -> None:
    """Before, 200 kB of ids were 16 MB of text, written twice."""
    done, client, peak = exchange("/v1/detokenize", {"tokens": [[LONGEST] * 4000] * 25}, request_bytes=2**22)
    assert error_of(done) == (400, "request_too_costly")
    assert "server.budget.request_bytes" in done.json()["error"]["message"]
    assert peak < 8 * 2**20
    assert client.budget.bytes == 0


def test_an_answer_is_charged_until_it_has_been_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    charge = AsyncEngineClient.charge

    def noted(self: AsyncEngineClient, size: int) -> None:
        charge(self, size)
        held.append(self.budget.bytes)

    monkeypatch.setattr(AsyncEngineClient, "charge", noted)
    done, client, _ = exchange("/v1/detokenize", {"tokens": [[97] * 4000] * 20})
    assert (done.status, done.json()["text"]) == (200, ["a" * 4000] * 20)
    assert held == [4000 * 20 * 2 * tokens.LETTER_BYTES - 256 * 1024]
    assert client.budget.bytes == 0


@pytest.mark.parametrize(
    ("ids", "status", "code"),
    [
        ([[1]] * 1024, 200, ""),
        ([[1]] * 1025, 400, "invalid_request"),
        ([1] * 4096, 200, ""),
        ([1] * 4097, 400, "context_length_exceeded"),
        ([[1], [1] * 4097], 400, "context_length_exceeded"),
    ],
    ids=["lists", "more lists", "ids", "more ids", "more ids in a list"],
)
def test_lists_are_bounded_in_number_and_length(ids: Any, status: int, code: str) -> None:
    done, *_ = exchange("/v1/detokenize", {"tokens": ids})
    assert done.status == status
    if status != 200:
        assert (done.json()["error"]["param"], done.json()["error"]["code"]) == ("tokens", code)


def test_long_answers_are_made_beside_the_loop() -> None:
    tokenizer = Counting()
    body = {"prompt": [chr(300 + i) * 4000 for i in range(10)], "return_token_strs": True}
    done, *_ = exchange("/v1/tokenize", body, tokenizer)
    assert done.json()["token_strs"][3] == [chr(303)] * 4000
    assert exchange("/v1/detokenize", {"tokens": done.json()["tokens"]}, tokenizer)[0].json()["text"] == body["prompt"]
    assert tokenizer.on_loop == 0


def test_spelled_tokens_are_priced() -> None:
    """Texts that are equal are charged once as texts; their tokens are written every time."""
    body = {"prompt": ["a" * 4000] * 100}
    assert exchange("/v1/tokenize", body, request_bytes=2**22)[0].status == 200
    done, *_ = exchange("/v1/tokenize", {**body, "return_token_strs": True}, request_bytes=2**22)
    assert error_of(done) == (400, "request_too_costly")
    assert json.dumps(done.json()["error"]["message"])
