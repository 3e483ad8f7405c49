"""OpenAI's formats, on a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pegboard.core.app import build_app
from pegboard.core.interfaces.api_router import ApiContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.testing.asgi import Exchange, call
from pegboard.core.testing.fake_client import FAILURE, SCRIPT, FakeEngineClient
from pegboard.plugins.api_openai.router import OpenAIRouter

TEXT = "".join(SCRIPT)
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def ask(method: str, path: str, body: Any = None, **settings: Any) -> tuple[Exchange, FakeEngineClient]:
    async def scene() -> tuple[Exchange, FakeEngineClient]:
        client = FakeEngineClient(**settings)
        router = OpenAIRouter(NoOptions(), ApiContext(client=client, max_body_bytes=10**6))
        return await call(build_app([("openai", router)], max_body_bytes=10**6), method, path, body), client

    return asyncio.run(scene())


def chat(**body: Any) -> tuple[Any, FakeEngineClient]:
    done, client = ask("POST", CHAT, {"model": "fake-model", "messages": MESSAGES, **body})
    assert done.status == 200, done.body
    return done.json(), client


def complete(**body: Any) -> tuple[Any, FakeEngineClient]:
    done, client = ask("POST", COMPLETIONS, {"model": "fake-model", "prompt": "Hi", **body})
    assert done.status == 200, done.body
    return done.json(), client


def stream(path: str, **body: Any) -> list[dict[str, Any]]:
    done, _ = ask("POST", path, {"stream": True, **body})
    *events, last = done.events()
    assert last == "[DONE]"
    return [json.loads(one) for one in events]


def test_chat() -> None:
    body, client = chat()
    assert body["object"] == "chat.completion"
    assert body["model"] == "fake-model"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    prompt = "user: Hi\nassistant:"
    assert client.requests[0].prompt == prompt
    assert not client.requests[0].add_special_tokens
    assert client.requests[0].sampling.max_new_tokens is None
    assert body["id"] == client.requests[0].rid
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(TEXT),
        "total_tokens": len(prompt) + len(TEXT),
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_chat_stream() -> None:
    first, *middle, last = stream(CHAT, messages=MESSAGES)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert first["object"] == "chat.completion.chunk"
    text = "".join(one["choices"][0]["delta"].get("content", "") for one in [*middle, last])
    assert text == TEXT
    assert last["choices"][0]["finish_reason"] == "stop"
    assert all(one["choices"][0]["finish_reason"] is None for one in middle)
    assert len({one["id"] for one in [first, *middle, last]}) == 1


def test_stream_usage() -> None:
    *chunks, last = stream(CHAT, messages=MESSAGES, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(TEXT)
    assert all(one["usage"] is None for one in chunks)
    assert all("usage" not in one for one in stream(CHAT, messages=MESSAGES))


def test_completion() -> None:
    body, client = complete()
    assert body["object"] == "text_completion"
    assert body["choices"][0]["text"] == TEXT
    assert client.requests[0].sampling.max_new_tokens == 16
    assert client.requests[0].add_special_tokens


def test_completion_stream() -> None:
    chunks = stream(COMPLETIONS, prompt="Hi")
    assert [one["choices"][0]["text"] for one in chunks] == list(SCRIPT)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(("prompt", "count"), [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2]], 2)])
def test_prompts_of_all_kinds(prompt: Any, count: int) -> None:
    body, _ = complete(prompt=prompt)
    assert [one["index"] for one in body["choices"]] == list(range(count))


def test_n_answers() -> None:
    body, client = complete(prompt=["a", "bb"], n=2, seed=5)
    assert len(body["choices"]) == 4
    assert [one.prompt for one in client.requests] == ["a", "a", "bb", "bb"]
    assert [one.sampling.seed for one in client.requests] == [5, 6, 5, 6]
    assert body["usage"]["prompt_tokens"] == 3, "a prompt counts once"
    indexes = {one["choices"][0]["index"] for one in stream(CHAT, messages=MESSAGES, n=3)}
    assert indexes == {0, 1, 2}


def test_echo() -> None:
    assert complete(echo=True)[0]["choices"][0]["text"] == "Hi" + TEXT
    assert complete(echo=True, prompt=[72, 105])[0]["choices"][0]["text"] == "Hi" + TEXT
    assert "".join(one["choices"][0]["text"] for one in stream(COMPLETIONS, prompt="Hi", echo=True)) == "Hi" + TEXT


def test_chat_logprobs() -> None:
    entries = chat(logprobs=True, top_logprobs=2)[0]["choices"][0]["logprobs"]["content"]
    assert len(entries) == len(TEXT)
    assert entries[0]["token"] == "O"
    assert entries[0]["bytes"] == [ord("O")]
    assert [one["token"] for one in entries[0]["top_logprobs"]] == ["A", "B"]
    assert chat(logprobs=True)[0]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_completion_logprobs() -> None:
    logprobs = complete(logprobs=1)[0]["choices"][0]["logprobs"]
    assert logprobs["tokens"] == list(TEXT)
    assert logprobs["top_logprobs"][0] == {"A": -0.5, "O": -0.5}
    assert logprobs["text_offset"] == list(range(len(TEXT)))
    offsets = [one["choices"][0]["logprobs"]["text_offset"][0] for one in stream(COMPLETIONS, prompt="a", logprobs=0)]
    assert offsets == [0, len(SCRIPT[0]), len(SCRIPT[0] + SCRIPT[1])]


def test_parameters_arrive() -> None:
    _, client = chat(
        max_tokens=3, max_completion_tokens=4, stop="END", top_k=5, min_p=0.1, min_tokens=1, stop_token_ids=[9],
        ignore_eos=True, repetition_penalty=1.1, skip_special_tokens=False, rid="mine", cache_salt="s", priority=2,
        params={"session": {"id": "x"}},
        logit_bias={"7": -1}, frequency_penalty=0.5, presence_penalty=0.25, temperature=0, top_p=0.5, seed=1,
    )  # fmt: skip
    request = client.requests[0]
    sampling = request.sampling
    assert (request.rid, request.cache_salt, request.priority) == ("mine", "s", 2)
    assert request.params == {"session": {"id": "x"}}
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.stop) == (4, 1, ("END",))
    assert (sampling.top_k, sampling.min_p, sampling.top_p, sampling.temperature) == (5, 0.1, 0.5, 0)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.skip_special_tokens) == ((9,), True, False)
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.1, 0.5, 0.25)
    assert (sampling.logit_bias, sampling.seed) == ({7: -1.0}, 1)


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    _, client = chat(messages=[{"role": "user", "content": parts}])
    assert client.requests[0].prompt == "user: one\ntwo\nassistant:"


def test_final_message_can_be_continued() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Hello"}]
    _, client = chat(messages=messages, continue_final_message=True)
    assert client.requests[0].prompt == "user: Hi\nassistant: Hello"


def test_models() -> None:
    card = ask("GET", "/v1/models")[0].json()["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake-model", "model", 4096)
    assert ask("GET", "/v1/models/fake-model")[0].json()["id"] == "fake-model"
    assert ask("GET", "/v1/models/other")[0].status == 404


def test_unknown_model() -> None:
    for path, more in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "a"})):
        done, _ = ask("POST", path, {"model": "gpt-5", **more})
        assert done.status == 404
        assert done.json()["error"]["code"] == "model_not_found"
    assert chat(model=None)[0]["model"] == "fake-model"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"stop": 5}, "stop"),
    ],
)
def test_bad_chats_name_the_field(body: dict[str, Any], field: str) -> None:
    done, client = ask("POST", CHAT, {"messages": MESSAGES, **body})
    assert done.status == 400, done.body
    assert done.json()["error"]["param"] == field
    assert done.json()["error"]["type"] == "invalid_request_error"
    assert client.requests == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"logprobs": 100}, "logprobs"),
    ],
)
def test_bad_completions_name_the_field(body: dict[str, Any], field: str) -> None:
    done, _ = ask("POST", COMPLETIONS, {"prompt": "a", **body})
    assert done.status == 400, done.body
    assert done.json()["error"]["param"] == field


def test_failure_in_a_stream_is_an_event() -> None:
    done, _ = ask("POST", CHAT, {"messages": MESSAGES, "stream": True}, fail_at=1)
    *_, error, last = done.events()
    assert json.loads(error)["error"]["message"] == FAILURE
    assert last == "[DONE]"


def test_failure_of_one_answer_of_several_is_an_error() -> None:
    done, client = ask("POST", COMPLETIONS, {"prompt": ["a", "b"]}, fail_at=1)
    assert done.status == 503
    assert len(client.requests) == 2
