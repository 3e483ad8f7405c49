"""The native routes' own format, on a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pegboard.core.app import build_app
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.testing.asgi import Exchange, call
from pegboard.core.testing.fake_client import SCRIPT, FakeEngineClient
from pegboard.plugins.api_native.options import NativeOptions
from pegboard.plugins.api_native.router import NativeRouter

TEXT = "".join(SCRIPT)


def ask(method: str, path: str, body: Any = None, **settings: Any) -> tuple[Exchange, FakeEngineClient]:
    async def scene() -> tuple[Exchange, FakeEngineClient]:
        client = FakeEngineClient()
        for name, value in settings.items():
            setattr(client, name, value)
        router = NativeRouter(NativeOptions(), ApiContext(client=client, max_body_bytes=10**6))
        return await call(build_app([("native", router)], max_body_bytes=10**6), method, path, body), client

    return asyncio.run(scene())


def generate(**body: Any) -> tuple[Any, FakeEngineClient]:
    done, client = ask("POST", "/generate", body)
    assert done.status == 200, done.body
    return done.json(), client


def test_one_answer() -> None:
    answer, client = generate(text="Hi", rid="r1", sampling_params={"max_new_tokens": 5, "temperature": 0})
    assert answer["text"] == TEXT
    assert answer["output_ids"] == [ord(char) for char in TEXT]
    meta = answer["meta_info"]
    assert meta["id"] == "r1"
    assert meta["finish_reason"] == {"type": "stop", "matched": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, len(TEXT), 2)
    assert {"num_retractions", "weight_version", "e2e_latency"} <= meta.keys()
    assert client.requests[0].sampling.max_new_tokens == 5
    assert client.requests[0].sampling.greedy


def test_defaults_are_the_fields() -> None:
    _, client = generate(text="Hi")
    sampling = client.requests[0].sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p) == (128, 1.0, 1.0)


def test_token_ids_are_a_prompt() -> None:
    _, client = generate(input_ids=[1, 2, 3])
    assert client.requests[0].prompt == [1, 2, 3]


def test_lists_are_batches() -> None:
    answers, client = generate(
        text=["a", "b"], rid=["x", "y"], sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}]
    )
    assert [one["meta_info"]["id"] for one in answers] == ["x", "y"]
    assert [one.sampling.max_new_tokens for one in client.requests] == [1, 2]
    answers, _ = generate(input_ids=[[1], [2, 3]])
    assert [one["meta_info"]["prompt_tokens"] for one in answers] == [1, 2]
    answers, _ = generate(text=["a"])
    assert isinstance(answers, list)


def test_what_is_said_to_plugins_arrives() -> None:
    _, client = generate(text=["a", "b"], params={"session": {"id": "x"}})
    assert [one.params for one in client.requests] == [{"session": {"id": "x"}}] * 2


def test_n_answers_have_ids_and_seeds_of_their_own() -> None:
    answers, client = generate(text="a", rid="r", sampling_params={"n": 3, "seed": 7})
    assert [one["meta_info"]["id"] for one in answers] == ["r_0", "r_1", "r_2"]
    assert [one.sampling.seed for one in client.requests] == [7, 8, 9]


def test_stream_is_cumulative_and_ends_in_done() -> None:
    done, _ = ask("POST", "/generate", {"text": "Hi", "stream": True})
    *events, last = done.events()
    assert last == "[DONE]"
    texts = [json.loads(one)["text"] for one in events]
    assert texts == [SCRIPT[0], SCRIPT[0] + SCRIPT[1], TEXT]
    assert json.loads(events[0])["meta_info"]["finish_reason"] is None
    assert json.loads(events[-1])["meta_info"]["finish_reason"]["type"] == "stop"


def test_streamed_batches_carry_an_index() -> None:
    done, _ = ask("POST", "/generate", {"text": ["a", "b"], "stream": True})
    *events, _last = [json.loads(one) if one != "[DONE]" else {} for one in done.events()]
    final = {one["index"]: one["text"] for one in events}
    assert final == {0: TEXT, 1: TEXT}


def test_logprobs_are_value_id_text() -> None:
    answer, _ = generate(
        text="Hi", return_logprob=True, top_logprobs_num=2, token_ids_logprob=[90], return_text_in_logprobs=True
    )
    meta = answer["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.5, ord("O"), "O"]
    assert meta["output_top_logprobs"][0] == [[-0.5, 65, "A"], [-1.5, 66, "B"]]
    assert meta["output_token_ids_logprobs"][0] == [[-9.0, 90, "Z"]]
    assert len(meta["output_token_logprobs"]) == len(answer["output_ids"])
    answer, _ = generate(text="Hi", return_logprob=True)
    assert answer["meta_info"]["output_token_logprobs"][0] == [-0.5, ord("O"), None]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": 5}, "text"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": [1, "a"]}, "input_ids"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "sampling_params": {"max_new_tokens": "many"}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": True}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"stop": [1]}}, "sampling_params.stop"),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"n": 10**9}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["one"]}, "rid"),
        ({"text": "a", "image_data": "http://example.com/a.png"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
    ],
)
def test_bad_input_names_the_field(body: dict[str, Any], field: str) -> None:
    done, client = ask("POST", "/generate", body)
    assert done.status == 400
    assert done.json()["error"]["param"] == field
    assert client.requests == []


def test_null_and_extra_fields_are_tolerated() -> None:
    generate(text="a", image_data=None, lora_path=None, sampling_params={"stop": None, "regex": None}, bootstrap_room=None)


def test_health() -> None:
    for path in ("/health", "/ping"):
        assert ask("GET", path, is_ready=False)[0].status == 200
    done, client = ask("GET", "/health_generate")
    assert done.status == 200
    assert client.requests[0].sampling.max_new_tokens == 1
    assert ask("GET", "/health_generate", is_ready=False)[0].status == 503


def test_information() -> None:
    for path in ("/model_info", "/get_model_info"):
        info = ask("GET", path)[0].json()
        assert info["model_path"] == "/models/fake"
        assert info["max_context_length"] == 4096
    for path in ("/server_info", "/get_server_info"):
        assert ask("GET", path)[0].json()["scheduler"]["running_requests"] == 2
    assert ask("GET", "/v1/loads")[0].json()["loads"][0]["num_reqs"] == 3
    assert ask("GET", "/get_load")[0].json()[0]["num_waiting_reqs"] == 1
    assert "weight_version" in ask("GET", "/get_weight_version")[0].json()


def test_flush_cache() -> None:
    done, client = ask("POST", "/flush_cache")
    assert done.status == 200
    assert client.flushes == 1
    assert ask("POST", "/flush_cache", busy=True)[0].status == 400


def test_abort_request() -> None:
    assert ask("POST", "/abort_request", {"rid": "x"})[1].abort_calls == [("x", False)]
    assert ask("POST", "/abort_request", {"abort_all": True})[1].abort_calls == [("", True)]
    assert ask("POST", "/abort_request", {})[0].status == 400
