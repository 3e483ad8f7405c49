"""Two hundred mixed requests at once, a third of them aborted or cut off midway: the others are answered as they
are alone, and afterwards every slot is free or cached, and nothing is locked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import serving
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams
from tests.e2e.reference import NEAR_TIE

REQUESTS = 200
ENDLESS = 3000
"""Tokens that a request asks for which is going to be cut off: more than the pool holds."""

ATTEMPTS = 10
"""How often a request is sent that is to be cut off. A server that is left to itself, while the client does not get to
run, fills the pool for a single request in half a second; then it has ended before it was cut off, and is sent again,
to be cut off in half the time.
"""

ROUTES = ("native", "completions", "chat")
ENDINGS = ("abort", "disconnect while streaming", "disconnect while waiting")
WORDS = ["one", "two", "three", "seven", "server", "answers", "requests", "prompt", "cache", "weather", "north"]

SERVER: dict[str, Any] = {
    "attention": {"use": "torch"},
    # Far less memory than all requests want together, and an admission that reckons with short answers.
    "scheduler": {"max_running_requests": 64, "chunked_prefill_size": 64, "estimate_max_new_tokens": 4},
}


@dataclass(frozen=True)
class Case:
    """One request. `ending` is how it is cut off, "" where it is read to its end; `text` is its answer alone."""

    number: int
    route: str
    stream: bool
    prompt: str
    params: dict[str, Any]
    ending: str = ""
    text: str = ""

    @property
    def rid(self) -> str:
        return f"storm-{self.number}"

    @property
    def seeded(self) -> bool:
        return "seed" in self.params

    def post(self) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        common = {"rid": self.rid, "stream": self.stream}
        if self.route == "native":
            return "/generate", {**common, "text": self.prompt, "sampling_params": self.params}
        params = {**self.params, "max_tokens": self.params["max_new_tokens"]}
        del params["max_new_tokens"]
        if self.route == "completions":
            return "/v1/completions", {**common, **params, "model": "m", "prompt": self.prompt}
        return "/v1/chat/completions", {**common, **params, "model": "m", "messages": self.messages}

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]


def make_cases(engine: Engine, requests: int = REQUESTS) -> list[Case]:
    """Cases whose answers do not hang on a near-tie, with what each is answered alone."""
    draw = np.random.default_rng(5)
    stems = [" ".join(draw.choice(WORDS, size=length)) for length in (30, 12, 5)]
    # Answers never end by themselves; but the scheduler, which plans exactly for requests that ignore these tokens,
    # does not know.
    never = dict.fromkeys(engine.tokenizer.eos_token_ids, -100.0)
    cases: list[Case] = []
    while len(cases) < requests:
        number = len(cases)
        prompt = f"{draw.choice(stems)} {' '.join(draw.choice(WORDS, size=int(draw.integers(1, 20))))}"
        params: dict[str, Any] = {"temperature": 0.0, "logit_bias": never, "max_new_tokens": int(draw.integers(1, 40))}
        if draw.random() < 0.25:
            params |= {"temperature": 0.8, "seed": int(draw.integers(0, 2**31))}
        case = Case(number, ROUTES[number % 3], bool(draw.random() < 0.6), prompt, params)
        if draw.random() < 1 / 3:
            ending = ENDINGS[int(draw.integers(0, 3))]
            stream = ending != "disconnect while waiting"
            cases.append(Case(number, case.route, stream, prompt, {**params, "max_new_tokens": ENDLESS}, ending=ending))
            continue
        text = answer_alone(engine, case)
        if text is not None:
            cases.append(Case(number, case.route, case.stream, prompt, params, text=text))
    return cases


def answer_alone(engine: Engine, case: Case) -> str | None:
    """The answer in an engine that does nothing else; None where two tokens are so close that the batch may decide."""
    chat = case.route == "chat"
    prompt = engine.tokenizer.apply_chat_template(case.messages) if chat else case.prompt
    request = GenerateRequest(
        prompt=prompt, sampling=SamplingParams(**case.params), logprobs=2, add_special_tokens=not chat
    )
    output = engine.run([request])[0]
    gaps = [top[0][0] - top[1][0] for _, _, top in output.logprobs or []]
    return None if not case.seeded and min(gaps) < NEAR_TIE else output.text


class Storm:
    """The client's side."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.answers: dict[int, str] = {}
        self.repeated = 0
        """Requests that ended before they were cut off, each of which has been sent again."""

    async def run(self, cases: list[Case]) -> None:
        async with asyncio.TaskGroup() as group:
            for case in cases:
                group.create_task(self.one(case))

    async def one(self, case: Case) -> None:
        if not case.ending:
            await self.answered(case)
            return
        for attempt in range(ATTEMPTS):
            if await self.cut_off(case, 0.5**attempt):
                return
            self.repeated += 1
        raise AssertionError(f"{case} was to be cut off and ended {ATTEMPTS} times")

    async def answered(self, case: Case) -> None:
        path, body = case.post()
        if not case.stream:
            response = await self.client.post(path, json=body)
            assert response.status_code == 200, response.text
            self.answers[case.number] = text_of(case, response.json())
            return
        text = ""
        async with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for event in events(response):
                text = event["text"] if case.route == "native" else text + delta_of(case, event)
        self.answers[case.number] = text

    async def cut_off(self, case: Case, sooner: float) -> bool:
        """False where it ended by itself before, for its length. An abort that was sent must be heard."""
        path, body = case.post()
        if case.ending == "disconnect while waiting":
            task = asyncio.create_task(self.client.post(path, json=body))
            await asyncio.wait([task], timeout=(0.2 + 0.02 * (case.number % 40)) * sooner)
            if task.done():
                response = task.result()
                assert response.status_code == 200, response.text
                assert finish_of(case, response.json()) == "length", response.text
                return False
            task.cancel()
            await asyncio.wait([task])
            return True
        finish, aborted, last = None, False, int(case.number % 60 * sooner)
        async with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for number, event in aenumerate(events(response)):
                finish = finish_of(case, event) or finish
                if number != last:
                    continue
                if case.ending == "disconnect while streaming":
                    return True
                reply = await self.client.post("/abort_request", json={"rid": case.rid})
                assert reply.status_code == 200
                aborted = True
        if aborted and finish == "length":
            return False  # it had ended when it was aborted, and only its last events were still to be read
        assert finish == ("abort" if aborted else "length"), case
        return aborted


async def aenumerate(source: AsyncIterator[dict[str, Any]]) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    number = 0
    async for one in source:
        yield number, one
        number += 1


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of a stream's events up to [DONE]."""
    async for line in response.aiter_lines():
        if line.startswith("data:") and line != "data: [DONE]":
            event: dict[str, Any] = json.loads(line.removeprefix("data:"))
            assert "error" not in event, event
            yield event


def delta_of(case: Case, event: dict[str, Any]) -> str:
    return "".join(
        (choice["text"] if case.route == "completions" else choice["delta"].get("content")) or ""
        for choice in event["choices"]
    )


def finish_of(case: Case, event: dict[str, Any]) -> str | None:
    if case.route == "native":
        reason = event["meta_info"]["finish_reason"]
        return reason["type"] if reason else None
    return next((choice["finish_reason"] for choice in event["choices"] if choice.get("finish_reason")), None)


def text_of(case: Case, body: dict[str, Any]) -> str:
    if case.route == "native":
        return str(body["text"])
    choice = body["choices"][0]
    return str(choice["text"] if case.route == "completions" else choice["message"]["content"] or "")


async def until_idle(client: httpx.AsyncClient) -> dict[str, Any]:
    """The scheduler's state once nothing waits or runs any more."""
    while True:
        state: dict[str, Any] = (await client.get("/server_info")).json()["scheduler"]
        if not state["waiting_requests"] and not state["running_requests"]:
            return state
        await asyncio.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("loop", "cache", "page_size"),
    [
        ("overlap", "radix", 1),
        pytest.param("normal", "block", 16, marks=pytest.mark.full),
        pytest.param("overlap", "none", 1, marks=pytest.mark.full),
    ],
)
def test_storm(loop: str, cache: str, page_size: int, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = {
        **SERVER,
        "model": {
            "path": str(tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)),
            "dtype": "float32",
            "device": "cpu",
            "served_name": "m",
        },
        "scheduler": {**SERVER["scheduler"], "loop": loop},
        "prefix_cache": {"use": cache},
        "memory": {"page_size": page_size, "max_total_tokens": 1024},
    }
    with Engine.from_config(config) as engine:
        cases = make_cases(engine)
    with serving(config) as server:
        storm, state = asyncio.run(rage(server.address, cases))
        log = server.log()
    check(storm, state, cases)
    assert "Traceback" not in log, log


async def rage(address: str, cases: list[Case]) -> tuple[Storm, dict[str, Any]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=240, limits=limits) as client:
        storm = Storm(client)
        await storm.run(cases)
        return storm, await until_idle(client)


def check(storm: Storm, state: dict[str, Any], cases: list[Case]) -> None:
    kept = [case for case in cases if not case.ending]
    cut = [case for case in cases if case.ending]
    assert 0.25 * len(cases) <= len(cut) <= 0.425 * len(cases), "about a third"
    assert {case.ending for case in cut} == set(ENDINGS)
    wrong = [case for case in kept if storm.answers[case.number] != case.text]
    # A sampled token may tip over where the draw falls between two tokens; near-ties of greedy ones are left out.
    assert not [case for case in wrong if not case.seeded], wrong
    assert len(wrong) <= 1, wrong
    assert state["retractions"] > 0, "the pool was meant to be small"
    assert state["locked_tokens"] == 0
    assert state["held_tokens"] == 0
    assert state["free_tokens"] + state["cached_tokens_now"] == state["total_tokens"]
