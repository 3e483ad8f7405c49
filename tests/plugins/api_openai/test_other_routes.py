"""Models, embeddings, scores, ranks and tokens on a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse, Model

from pegboard.conformance.asgi import PATIENCE, Exchange
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.interfaces.client import Embedding, EmbedRequest
from tests.plugins.api_openai import asking
from tests.plugins.api_openai.asking import CHAT, COMPLETIONS, MESSAGES, ask, make_app

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"


# ---- models ----------------------------------------------------------------------------------------------------------


def test_models() -> None:
    card = ask("GET", "/v1/models")[0].json()["data"][0]
    Model.model_validate(card, strict=True)
    assert (card["id"], card["object"], card["max_model_len"], card["root"]) == (
        "fake-model",
        "model",
        4096,
        "/models/fake",
    )
    assert ask("GET", "/v1/models/fake-model")[0].json() == card
    assert ask("GET", "/v1/models//models/fake")[0].json() == card
    assert ask("GET", "/v1/models/other")[0].status == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (COMPLETIONS, {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        (EMBEDDINGS, {"input": "a"}),
        (SCORE, {"text_1": "a", "text_2": "b"}),
        (RERANK, {"query": "a", "documents": ["b"]}),
        ("/v1/classify", {"input": "a"}),
        ("/v1/tokenize", {"prompt": "a"}),
        ("/v1/detokenize", {"tokens": [1]}),
    ],
)
def test_unknown_model(path: str, body: dict[str, Any]) -> None:
    done, client = ask("POST", path, {"model": "gpt-5", **body})
    assert done.status == 404
    assert done.json()["error"]["code"] == "model_not_found"
    assert done.json()["error"]["param"] == "model"
    assert not client.requests
    assert not client.embedded


# ---- embeddings ------------------------------------------------------------------------------------------------------


def embed(**body: Any) -> tuple[dict[str, Any], FakeEngineClient]:
    return asking.post(EMBEDDINGS, {"model": "fake-model", **body})


@pytest.mark.parametrize(("prompts", "count"), [("ab", 1), (["ab", "c"], 2), ([97, 98], 1), ([[97, 98], [99]], 2)])
def test_embeddings(prompts: Any, count: int) -> None:
    body, client = embed(input=prompts)
    CreateEmbeddingResponse.model_validate(body, strict=True)
    assert [one["index"] for one in body["data"]] == list(range(count))
    assert [one.prompt for one in client.embedded] == (prompts if count > 1 else [prompts])
    assert body["usage"] == {"prompt_tokens": 1 + count, "total_tokens": 1 + count}
    vector = body["data"][0]["embedding"]
    assert math.hypot(*vector) == pytest.approx(1)


def test_base64_is_the_same_in_float32() -> None:
    plain = embed(input="ab")[0]["data"][0]["embedding"]
    packed = base64.b64decode(embed(input="ab", encoding_format="base64")[0]["data"][0]["embedding"])
    assert struct.unpack(f"<{len(plain)}f", packed) == pytest.approx(plain, abs=1e-7)


def test_parameters_of_embeddings_arrive() -> None:
    _, client = embed(input=["a", "b"], dimensions=2, normalize=False, rid="mine", cache_salt="s", priority=3)
    request = client.embedded[1]
    assert (request.rid, request.dimensions, request.normalize) == ("mine_1", 2, False)
    assert (request.cache_salt, request.priority) == ("s", 3)


class Sleepy(FakeEngineClient):
    """Never answers; knows whether it was told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.began = asyncio.Event()
        self.cancelled = False

    async def embed(self, requests: Sequence[EmbedRequest]) -> list[Embedding]:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBEDDINGS, b'{"input": "a"}'),
        (SCORE, b'{"text_1": "a", "text_2": "b"}'),
        (RERANK, b'{"query": "a", "documents": ["b"]}'),
    ],
)
def test_who_leaves_is_not_worked_for(path: str, body: bytes) -> None:
    async def scene() -> Sleepy:
        client = Sleepy()
        exchange = Exchange(make_app(client), "POST", path, body)
        await asyncio.wait_for(client.began.wait(), PATIENCE)
        exchange.leave()
        await exchange.end()
        return client

    assert asyncio.run(scene()).cancelled


# ---- scores ----------------------------------------------------------------------------------------------------------


def cosine(one: str, other: str) -> float:
    first, second = (embed(input=text)[0]["data"][0]["embedding"] for text in (one, other))
    return math.fsum(a * b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("a", "bcd", [("a", "bcd")]),
        ("a", ["bcd", "a"], [("a", "bcd"), ("a", "a")]),
        (["a", "xyz"], ["bcd", "xyz"], [("a", "bcd"), ("xyz", "xyz")]),
    ],
)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("query", "documents")])
def test_scores(first: Any, second: Any, pairs: list[tuple[str, str]], names: tuple[str, str]) -> None:
    body, client = asking.post(SCORE, {names[0]: first, names[1]: second})
    assert [one["score"] for one in body["data"]] == pytest.approx([cosine(*pair) for pair in pairs])
    assert len(client.embedded) == len({text for pair in pairs for text in pair}), "each text once"


def test_scores_of_labels() -> None:
    body, client = asking.post(SCORE, {"query": "Is it? ", "items": ["Yes.", "No."], "label_token_ids": [65, 66]})
    assert body["scores"] == [pytest.approx([math.exp(-9)] * 2)] * 2
    assert [one.prompt for one in client.requests] == ["Is it? Yes.", "Is it? No."]
    assert client.requests[0].token_ids_logprob == (65, 66)
    body, client = asking.post(
        SCORE,
        {"query": [1], "items": [[2]], "label_token_ids": [65, 66], "apply_softmax": True, "item_first": True},
    )
    assert body["scores"] == [[0.5, 0.5]]
    assert client.requests[0].prompt == [2, 1]


def test_ranks() -> None:
    documents = ["bcdefgh", {"text": "a"}, "bc"]
    body, _ = asking.post(RERANK, {"query": "a", "documents": documents})
    results = body["results"]
    assert results[0] == {"index": 1, "relevance_score": pytest.approx(1), "document": {"text": "a"}}
    scores = [one["relevance_score"] for one in results]
    assert scores == sorted(scores, reverse=True)
    assert {one["index"] for one in results} == {0, 1, 2}
    body, _ = asking.post(RERANK, {"query": "a", "documents": documents, "top_n": 1, "return_documents": False})
    assert [set(one) for one in body["results"]] == [{"index", "relevance_score"}]


def test_classify_says_that_this_model_cannot() -> None:
    error = asking.refused("/v1/classify", {"input": "a"})
    assert error["code"] == "unsupported"
    assert "no head" in error["message"]


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokens(prefix: str) -> None:
    body, _ = asking.post(f"{prefix}/tokenize", {"prompt": "abc", "return_token_strs": True})
    assert body == {"tokens": [97, 98, 99], "count": 3, "max_model_len": 4096, "token_strs": ["a", "b", "c"]}
    body, _ = asking.post(f"{prefix}/detokenize", {"tokens": body["tokens"]})
    assert body == {"prompt": "abc", "text": "abc"}


def test_tokens_of_several() -> None:
    body, _ = asking.post("/v1/tokenize", {"prompt": ["ab", "c"]})
    assert (body["tokens"], body["count"], body["token_strs"]) == ([[97, 98], [99]], [2, 1], None)
    assert asking.post("/v1/detokenize", {"tokens": [[97, 98], [99]]})[0]["text"] == ["ab", "c"]
    assert asking.post("/v1/detokenize", {"tokens": []})[0]["text"] == ""


def test_special_tokens_may_stay() -> None:
    assert asking.post("/v1/detokenize", {"tokens": [97, 3]})[0]["text"] == "a"
    assert asking.post("/v1/detokenize", {"tokens": [97, 3], "skip_special_tokens": False})[0]["text"] == "a\x03"


def test_tokens_of_conversations() -> None:
    text = "user: Hi\nassistant:"
    body, _ = asking.post("/v1/tokenize", {"messages": MESSAGES})
    assert body["tokens"] == [ord(char) for char in text]
    body, _ = asking.post("/v1/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
    assert body["count"] == len("user: Hi\n")
