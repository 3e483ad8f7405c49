"""Routes that vLLM and SageMaker have, and the model under several names."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from pegboard.conformance.asgi import Exchange, call
from pegboard.conformance.fake_client import FakeEngineClient, FakeTokenizer
from pegboard.toolkit.http.bodies import SMALL_BODY
from tests.plugins.api_openai import asking

INVOKE, RENDER = "/invocations", "/v1/chat/completions/render"


def exchange(method: str, path: str, body: Any = None) -> tuple[Exchange, FakeEngineClient]:
    """One exchange with a server that calls its model `a` and `b/c`, and its engine."""

    async def scene() -> tuple[Exchange, FakeEngineClient]:
        client = FakeEngineClient()
        client._info = dataclasses.replace(client.info, served_name="a", other_names=("b/c",))
        return await call(asking.make_app(client), method, path, body), client

    return asyncio.run(scene())


def with_names(method: str, path: str, body: Any = None) -> Exchange:
    return exchange(method, path, body)[0]


def test_every_name_is_listed_and_taken() -> None:
    listed = with_names("GET", "/v1/models").json()["data"]
    assert [(one["id"], one["root"]) for one in listed] == [("a", "/models/fake"), ("b/c", "/models/fake")]
    for name, shown in (("a", "a"), ("b/c", "b/c"), ("/models/fake", "a")):
        assert with_names("GET", f"/v1/models/{name}").json()["id"] == shown
    for name in ("a", "b/c", "", "/models/fake", "unknown"):
        done = with_names("POST", asking.COMPLETIONS, {"model": name, "prompt": "Hi"})
        assert (done.status, done.json()["model"]) == (200, "a")
    done = with_names("POST", asking.COMPLETIONS, {"model": "c", "prompt": "Hi"})
    assert (done.status, done.json()["error"]["code"]) == (404, "model_not_found")
    assert "'a', 'b/c'" in done.json()["error"]["message"]


NAMED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/score": {"query": "Hi", "items": ["a"], "label_token_ids": [65]},
}


@pytest.mark.parametrize("path", NAMED)
def test_the_engine_learns_which_name_was_asked_for(path: str) -> None:
    done, client = exchange("POST", path, {"model": "b/c", **NAMED[path]})
    assert done.status == 200, done.body
    assert [*(one.model for one in client.requests), *(one.model for one in client.embedded)] == ["b/c"]


# ---- /tokenizer_info ---------------------------------------------------------------------------------------------


def test_a_client_without_the_tokenizer_can_do_with_this() -> None:
    """What lm-eval's remote tokenizer reads: names of tokens, which /tokenize makes ids of, and the template."""
    done, client = asking.ask("GET", "/tokenizer_info")
    info = done.json()
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == (chr(3), None, None)
    assert info["chat_template"] == client.tokenizer.chat_templates["default"]
    tokens, _ = asking.post("/tokenize", {"prompt": info["eos_token"], "add_special_tokens": False})
    assert tokens["tokens"] == info["eos_token_ids"] == [3]
    done, _ = asking.ask("GET", "/tokenizer_info", tokenizer=FakeTokenizer(has_chat_template=False))
    assert done.json()["chat_template"] is None


# ---- /pooling ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/pooling", "/v1/pooling"])
def test_pooling_gives_what_embeddings_give(path: str) -> None:
    body = {"input": ["ab", "c"], "dimensions": 2}
    pooled, client = asking.post(path, body)
    embedded, _ = asking.post("/v1/embeddings", body)
    assert [one["data"] for one in pooled["data"]] == [one["embedding"] for one in embedded["data"]]
    assert [one["object"] for one in pooled["data"]] == ["pooling"] * 2
    assert pooled["usage"] == embedded["usage"]
    assert [one.normalize for one in client.embedded] == [True, True]
    _, client = asking.post(path, {"input": "ab", "use_activation": False})
    assert [one.normalize for one in client.embedded] == [False]
    assert asking.refused(path, {"input": "ab", "task": "token_embed"})["param"] == "task"


# ---- render --------------------------------------------------------------------------------------------------------


def test_what_is_rendered_is_what_a_chat_sends() -> None:
    body = {"messages": asking.MESSAGES, "max_tokens": 7, "temperature": 0.5, "stop": ["x"], "seed": 3}
    rendered, asked = asking.post(RENDER, body)
    assert asked.requests == [], "nothing is generated"
    _, client = asking.post(asking.CHAT, body)
    assert rendered["prompt"] == client.requests[0].prompt
    assert rendered["token_ids"] == [ord(letter) for letter in rendered["prompt"]]
    sampling = rendered["sampling_params"]
    assert {name: sampling[name] for name in ("max_tokens", "temperature", "stop", "seed", "n")} == {
        "max_tokens": 7, "temperature": 0.5, "stop": ["x"], "seed": 3, "n": 1,
    }  # fmt: skip
    assert asking.refused(RENDER, {"messages": []})["param"] == "messages"


def test_a_model_without_a_template_renders_nothing() -> None:
    done, _ = asking.ask(
        "POST", RENDER, {"messages": asking.MESSAGES}, tokenizer=FakeTokenizer(has_chat_template=False)
    )
    assert done.status in (400, 404)
    assert "template" in done.json()["error"]["message"]


# ---- /invocations --------------------------------------------------------------------------------------------------

EMBEDDED = {"input": ["ab", "c"]}
PURPOSES = [
    (asking.CHAT, {"messages": asking.MESSAGES}),
    (asking.COMPLETIONS, {"prompt": "Hi", "messages": None}),
    ("/v1/embeddings", EMBEDDED),
    ("/v1/rerank", {"query": "a", "documents": ["b", "a"]}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "a"]}),
    ("/v1/score", {"query": "Is it? ", "items": ["Yes."], "label_token_ids": [65]}),
]


@pytest.mark.parametrize(("path", "body"), PURPOSES)
def test_the_body_says_what_it_is_for(path: str, body: dict[str, Any]) -> None:
    """Large ones too, which are read in a thread."""
    for more in ({}, {"filler": "x" * (SMALL_BODY + 1)}):
        found, _ = asking.post(INVOKE, {**body, **more})
        wanted, _ = asking.post(path, body)
        for one in (found, wanted):
            one.pop("id", None)
            one.pop("created", None)
        assert found == wanted


def test_streams_come_through_and_end_with_their_client() -> None:
    text = "".join(one["choices"][0]["text"] for one in asking.stream(INVOKE, {"prompt": "Hi"}) if one["choices"])
    assert text == "Once upon a midnight dreary."

    async def scene() -> list[str]:
        client = FakeEngineClient(stall_at=1)
        body = json.dumps({"prompt": "Hi", "stream": True}).encode()
        exchange = Exchange(asking.make_app(client), "POST", INVOKE, body)
        await client.submitted.wait()
        exchange.leave()
        await exchange.end()
        return client.aborted

    assert len(asyncio.run(scene())) == 1


@pytest.mark.parametrize("body", [{}, {"model": "fake-model"}, {"messages": None}, [], "Hi", 3, {"messages": 3}])
def test_a_body_for_nothing_is_refused(body: Any) -> None:
    assert asking.refused(INVOKE, body)["param"] in ("messages", None)


# ---- ranks, for SGLang's router ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [{"rid": None}, {"rid": "mine"}, {"bare": True}])
def test_the_router_of_sglang_gets_its_own_form(sign: dict[str, Any]) -> None:
    """Its bodies always have a `rid`, and "unknown" where its client named no model."""
    body = {"query": "a", "documents": ["bcd", "a"], "model": "unknown", "user": None, "return_documents": True}
    found, _ = asking.post("/v1/rerank", {**body, **sign})
    assert [(one["index"], one["document"]) for one in found] == [(1, "a"), (0, "bcd")]
    assert found[0]["score"] == pytest.approx(1)
    assert found[0]["meta_info"]["prompt_tokens"] > 0
    found, _ = asking.post("/v1/rerank", {**body, **sign, "top_k": 1, "return_documents": False})
    assert [(one["index"], one["document"]) for one in found] == [(1, None)]
    usual, _ = asking.post("/v1/rerank", {"query": "a", "documents": ["bcd", "a"], "top_k": 1})
    assert [one["index"] for one in usual["results"]] == [1]
    usual, _ = asking.post("/v1/rerank", {**body, **sign, "bare": False})
    assert [one["index"] for one in usual["results"]] == [1, 0]
