"""A prompt that is too long is told in the words and codes by which clients know that they have to shorten it.

It is what litellm 1.106.2, langchain-openai 1.7.3 and langchain-anthropic 1.7.7 look for; `test_third_party_clients`
asks them themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pegboard.conformance.servers import Served
from tests.e2e.clients import CONTEXT, KEY, MODEL, tiny_model, tiny_server

pytestmark = pytest.mark.slow

LONG = "hello " * CONTEXT
LONGER = "hello " * CONTEXT * 8
"""Refused before it becomes tokens."""
WORDS = re.compile(
    r"prompt is too long: (over )?(\d+) tokens > (\d+) maximum; "
    rf"this model's maximum context length is {CONTEXT} tokens"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tiny_server(tiny_model(tmp_path_factory.mktemp("model"))) as one:
        yield one


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ASKED: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"messages": said(text)},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/embeddings": lambda text: {"input": text},
    "/v1/messages": lambda text: {"model": MODEL, "messages": said(text), "max_tokens": 8},
    "/generate": lambda text: {"text": text},
}


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("text", [LONG, LONGER], ids=["long", "longer"])
@pytest.mark.parametrize("path", ASKED)
def test_every_api_says_it_in_these_words(server: Served, path: str, text: str, streamed: bool) -> None:
    body = {**ASKED[path](text), **({} if path == "/v1/embeddings" else {"stream": streamed})}
    headers = {"authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{server.address}{path}", json=body, headers=headers, timeout=60)
    error = answer.json()["error"]
    found = WORDS.search(error["message"])
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert found is not None, error["message"]
    assert int(found[2]) > int(found[3]) or found[1]
    code = error["details"]["error_code"] if path == "/v1/messages" else error["code"]
    assert code == "context_length_exceeded"
