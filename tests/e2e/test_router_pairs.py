"""SGLang's own router in front of a prefill and a decode server: each request is computed on one and answered on the
other, and clients see what one server would have said.

`make clients` installs it, and runs these tests.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from pegboard.conformance.servers import Served, free_ports
from tests.e2e.clients import ADMIN_KEY, KEY, tiny_model, tiny_server
from tests.e2e.test_router import PYTHON, Routed, routing

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is not there (make clients)"),
]

MESSAGES = [{"role": "user", "content": "Tell me of the sea, please."}]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
PLAIN: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
IDLE = ("held_requests", "seated_requests", "quarantined_tokens", "blocked_requests", "running_requests")


@dataclass
class Pair:
    """A router with a prefill and a decode server behind it, and one server that does all by itself."""

    routed: Routed
    prefill: Served
    decode: Served
    one: httpx.Client

    def both(self, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
        """What a pair says, and what one server does."""
        alone = self.one.post(path, json=body)
        assert alone.status_code == 200, alone.text
        return self.routed.post(path, **body), alone.json()

    def state(self, server: Served) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        info = httpx.get(f"{server.address}/server_info", headers=headers, timeout=60).json()
        return dict(info["scheduler"])

    def is_empty(self) -> bool:
        return not any(self.state(server)[name] for server in (self.prefill, self.decode) for name in IDLE)

    def empties(self, seconds: float = 30.0) -> None:
        """Nothing is left of any request, soon."""
        end = time.monotonic() + seconds
        while not self.is_empty():
            assert time.monotonic() < end, [self.state(one) for one in (self.prefill, self.decode)]
            time.sleep(0.1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    log = tmp_path_factory.mktemp("router") / "router.log"
    (port,) = free_ports(1)
    with contextlib.ExitStack() as stack:
        start = stack.enter_context
        gate = {"use": "disagg", "role": "prefill", "listen": f"127.0.0.1:{port}", "hold": 5.0}
        prefill = start(tiny_server(model, gates=[gate]))
        decode = start(tiny_server(model, gates=[{"use": "disagg", "role": "decode"}]))
        alone = start(tiny_server(model))
        address = start(routing([decode], log, prefill=(prefill, port)))
        one = start(httpx.Client(base_url=alone.address, headers={"authorization": f"Bearer {KEY}"}, timeout=60))
        routed = Routed(address, [prefill, decode])
        yield Pair(routed, prefill, decode, one)
        routed.client.close()


def test_chats_are_the_same(pair: Pair) -> None:
    before = pair.state(pair.decode)["prompt_tokens"]
    body = {"messages": MESSAGES, **GREEDY}
    routed, alone = pair.both("/v1/chat/completions", body)
    assert routed["choices"] == alone["choices"]
    assert routed["usage"]["completion_tokens"] == 12
    assert pair.state(pair.decode)["prompt_tokens"] == before, "the decode server computes no prompt"
    with pair.routed.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    text = "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines[:-1])
    assert (text, lines[-1]) == (alone["choices"][0]["message"]["content"], "[DONE]")
    pair.empties()


def test_several_answers_and_prompts(pair: Pair) -> None:
    routed, alone = pair.both("/v1/chat/completions", {"messages": MESSAGES, "n": 2, **GREEDY})
    assert routed["choices"] == alone["choices"]
    routed, alone = pair.both("/v1/completions", {"model": "tiny", "prompt": ["Hello", "World, and"], **GREEDY})
    assert routed["choices"] == alone["choices"]
    routed, alone = pair.both("/generate", {"text": "Hello", "sampling_params": {**PLAIN, "n": 2}})
    assert [one["output_ids"] for one in routed] == [one["output_ids"] for one in alone]
    pair.empties()


def test_seeds_and_stops(pair: Pair) -> None:
    for seed in range(3):
        sampling = {**PLAIN, "temperature": 1.0, "sampling_seed": seed}
        routed, alone = pair.both("/generate", {"text": "Once", "sampling_params": sampling})
        assert routed["output_ids"] == alone["output_ids"]
    first = alone["output_ids"][0]
    sampling = {**PLAIN, "temperature": 1.0, "sampling_seed": 2, "stop_token_ids": [first]}
    routed, alone = pair.both("/generate", {"text": "Once", "sampling_params": sampling})
    assert routed["meta_info"]["finish_reason"] == alone["meta_info"]["finish_reason"]
    pair.empties()


def test_logprobs_are_joined(pair: Pair) -> None:
    """Of the prompt from the one server, of the answer from the other, its first token included."""
    body = {"text": "Tell me", "sampling_params": PLAIN, "return_logprob": True, "logprob_start_len": 0}
    routed, alone = pair.both("/generate", body)
    for name in ("input_token_logprobs", "output_token_logprobs"):
        found, wanted = routed["meta_info"][name], alone["meta_info"][name]
        assert [one[1] for one in found] == [one[1] for one in wanted], name
        assert [one[0] for one in found if one[0] is not None] == pytest.approx(
            [one[0] for one in wanted if one[0] is not None], abs=1e-4
        )
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **GREEDY}
    routed, alone = pair.both("/v1/chat/completions", chat)
    found, wanted = (one["choices"][0]["logprobs"]["content"] for one in (routed, alone))
    assert [one["token"] for one in found] == [one["token"] for one in wanted]
    assert [one["logprob"] for one in found] == pytest.approx([one["logprob"] for one in wanted], abs=1e-4)
    assert [len(one["top_logprobs"]) for one in found] == [2] * 12
    pair.empties()


def test_a_bad_request_is_refused_at_once(pair: Pair) -> None:
    """By both sides, and nothing waits for the other one."""
    for body in (
        {
            "messages": MESSAGES,
            "max_tokens": 5,
            "response_format": {"type": "json_schema", "json_schema": {"name": ""}},
        },
        {"messages": [{"role": "user", "content": "word " * 5000}]},
        {"messages": MESSAGES, "logit_bias": {"999999999": 1}},
    ):
        start = time.monotonic()
        answer = pair.routed.client.post("/v1/chat/completions", json=body)
        assert 400 <= answer.status_code < 500, answer.text
        assert time.monotonic() - start < 1.0
    pair.empties()


def test_clients_that_leave(pair: Pair) -> None:
    """Whole and streamed answers, at any moment."""
    for number in range(12):
        body = {"messages": MESSAGES, "max_tokens": 200, "ignore_eos": True, "stream": bool(number % 2)}
        with contextlib.suppress(httpx.TimeoutException):
            pair.routed.client.post("/v1/chat/completions", json=body, timeout=0.02 * number + 0.01)
    pair.empties()
    routed, alone = pair.both("/v1/chat/completions", {"messages": MESSAGES, **GREEDY})
    assert routed["choices"] == alone["choices"]


def test_two_hundred_requests(pair: Pair) -> None:
    """Sixteen at a time, with prompts that share beginnings."""

    def ask(client: httpx.Client, number: int) -> list[int]:
        text = "The sea. " * (number % 7) + f"Chapter {number}."
        answer = client.post("/generate", json={"text": text, "sampling_params": PLAIN})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["output_ids"])

    alone = [ask(pair.one, number) for number in range(200)]
    with ThreadPoolExecutor(16) as threads:
        routed = list(threads.map(lambda number: ask(pair.routed.client, number), range(200)))
    assert routed == alone
    pair.empties()


@pytest.mark.parametrize("policy", ["cache_aware", "power_of_two", "random"])
def test_policies(tmp_path_factory: pytest.TempPathFactory, policy: str) -> None:
    """Without pairs, as the router's policies ask servers: by load, and by prefixes."""
    model = tiny_model(tmp_path_factory.mktemp("model"))
    log = tmp_path_factory.mktemp("router") / "router.log"
    with tiny_server(model) as one, tiny_server(model) as other, routing([one, other], log, policy=policy) as address:
        routed = Routed(address, [one, other])
        answers = [routed.post("/v1/chat/completions", messages=MESSAGES, **GREEDY)["choices"] for _ in range(4)]
        assert answers == [answers[0]] * 4
        routed.client.close()
