"""`make soak`: thousands of mixed requests to one server, a third of them aborted or left by their clients, attacks
among them. Nothing is lost, nothing is answered twice, known answers are right, the books balance whenever the server
is idle, and over the second half memory stays flat.

The pool is small, so that requests wait and are retracted. SOAK_REQUESTS says how many there are (20,000).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.hostile import payloads
from benchmarks.hostile.measure import scheduler_of
from benchmarks.hostile.payloads import Ask
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving
from pegboard.core.engine.engine import Engine
from tests.e2e.test_abort_storm import ENDINGS, ENDLESS, Case, delta_of, finish_of, make_cases, text_of, until_idle

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "20000"))
WAVES = 20
"""After each the server is idle, and is looked at."""
AT_ONCE = 32
CASES = 90
"""Of which two thirds have an answer that is known."""
PATIENCE = 120.0
"""Seconds within which everything has to be answered."""
ATTACKS = 0.08
CUT_OFF = 0.3
ROOM, SHARE = 20 * 2**20, 0.05
"""How much more memory, in bytes or as a share, a process may have at the end than in the middle."""

CONFIG: dict[str, Any] = {
    "attention": {"use": "torch"},
    "memory": {"max_total_tokens": 1024},
    "scheduler": {"max_running_requests": 32, "chunked_prefill_size": 64, "estimate_max_new_tokens": 4},
    "server": {"shutdown_timeout": 5},
}


def small_attacks(rng: random.Random) -> Iterator[tuple[str, Ask]]:
    """The attacks of benchmarks/attacks.py, smaller, for a vocabulary of 320 tokens and a pool of 1,024."""
    text = rng.choice(list(payloads.long_texts(rng, 60_000).values()))
    body = rng.choice(list(payloads.bodies(rng.choice((2**16, 2**19, payloads.LARGEST_BODY + 1))).values()))
    long = payloads.some_ids(rng, 400)
    yield "big message", payloads.big_message(n=8, tokens=16, ids=300)
    yield "logprobs", payloads.logprobs("Once", tokens=40, ids=300)
    yield "prompt logprobs", payloads.logprobs(long, tokens=1, top=128, of_prompt=True)
    yield "logprob stream", payloads.logprobs("Once", tokens=300, top=128, stream=True)
    yield "text", payloads.read_text(rng.choice(("/v1/completions", "/tokenize", "/generate")), text)
    yield "stops", payloads.stops(rng, n=rng.choice((2, 32)), size=16 * 1024)
    yield "body", body
    yield "batch", payloads.long_ids(rng, 200, prompts=rng.choice((4, 64)))
    yield "too long a batch", payloads.long_ids(rng, 3000, prompts=16)
    yield "ambiguous", payloads.ambiguous(n=3, tokens=12)
    yield "slow grammar", payloads.slow_grammar(rng.randrange(10**6), rules=60)
    yield "grammar", payloads.quick_grammar(rng.randrange(10**6))


@dataclass
class Soak:
    """The clients' side."""

    client: httpx.AsyncClient
    cases: list[Case]
    rng: random.Random
    ends: Counter[str] = field(default_factory=Counter)
    """What became of requests, each counted once."""
    tipped: int = 0
    """Seeded answers that were others than alone."""
    slowest: dict[str, float] = field(default_factory=dict)

    async def wave(self, numbers: range) -> None:
        left = iter(numbers)

        async def work() -> None:
            for number in left:
                await self._one(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())

    async def _one(self, number: int) -> None:
        kind, start = self.rng.random(), time.monotonic()
        if kind < ATTACKS:
            name, one = self.rng.choice(list(small_attacks(self.rng)))
            self.ends[f"{name}: {await self._attack(name, one)}"] += 1
        else:
            case = replace(self.rng.choice(self.cases), number=number)
            name = "answered"
            if kind < ATTACKS + CUT_OFF:
                name = self.rng.choice(ENDINGS)
                case = replace(case, ending=name, stream=name != "disconnect while waiting")
                case = replace(case, params={**case.params, "max_new_tokens": ENDLESS})
            self.ends[f"{name}: {await self._until_taken(case)}"] += 1
        self.slowest[name] = max(self.slowest.get(name, 0.0), time.monotonic() - start)

    # ---- honest requests ------------------------------------------------------------------------------------------

    async def _until_taken(self, case: Case) -> str:
        """The request, again where the server had no room for it."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            outcome = await (self._streamed(case) if case.stream else self._whole(case))
            if outcome != "no room":
                return outcome
            self.ends["refused for a while"] += 1
            await asyncio.sleep(0.2)
        raise AssertionError(f"there was no room for {case} within {PATIENCE:g} s")

    async def _whole(self, case: Case) -> str:
        path, body = case.post()
        asked = asyncio.create_task(self.client.post(path, json=body))
        if case.ending:
            await asyncio.wait([asked], timeout=0.02 * (1 + case.number % 40))
            if not asked.done():
                asked.cancel()
                await asyncio.wait([asked])
                return "left"
        response = await asked
        if no_room(response.status_code, response.text):
            return "no room"
        assert response.status_code == 200, response.text
        answer = response.json()
        self._judge(case, text_of(case, answer), finish_of(case, answer))
        return str(finish_of(case, answer))

    async def _streamed(self, case: Case) -> str:
        path, body = case.post()
        stop_at = case.number % 30
        text, ends, done, number = "", [], 0, 0
        async with self.client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode()
                assert no_room(response.status_code, said), f"{case}: {response.status_code} {said}"
                return "no room"
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                assert not done, f"{case}: something behind the end: {line[:300]}"
                if line == "data: [DONE]":
                    done += 1
                    continue
                event = json.loads(line.removeprefix("data:"))
                assert "error" not in event, f"{case}: {event}"
                finish = finish_of(case, event)
                ends += [finish] if finish else []
                if case.route == "native":
                    text = event["text"]
                    meta = event["meta_info"]
                    assert not finish or len(event["output_ids"]) == meta["completion_tokens"], f"{case}: lost tokens"
                else:
                    text += delta_of(case, event)
                number += 1
                if number != stop_at:
                    continue
                if case.ending == "disconnect while streaming":
                    return "left"
                if case.ending == "abort":
                    reply = await self.client.post("/abort_request", json={"rid": case.rid})
                    assert reply.status_code == 200, reply.text
        assert done == 1, f"{case}: the stream has no end"
        assert len(ends) == 1, f"{case} has ended {len(ends)} times: {ends}"
        self._judge(case, text, ends[0])
        return str(ends[0])

    def _judge(self, case: Case, text: str, finish: str | None) -> None:
        if case.ending:
            # It may have ended for its length before.
            assert finish in ("length", "abort"), f"{case}: {finish}"
            return
        assert finish in ("length", "stop"), f"{case}: {finish}"
        if text != case.text:
            assert case.seeded, f"{case}: {text!r}"
            self.tipped += 1

    # ---- attacks --------------------------------------------------------------------------------------------------

    async def _attack(self, name: str, one: Ask) -> str:
        """The status of what is sent once, whatever comes of it; some clients leave."""
        leave = self.rng.random() < 0.3
        asked = asyncio.create_task(
            self.client.post(one.path, content=one.body, headers={"content-type": "application/json"})
        )
        await asyncio.wait([asked], timeout=self.rng.uniform(0.05, 1.0) if leave else PATIENCE)
        if not asked.done():
            asked.cancel()
            await asyncio.wait([asked])
            assert leave, f"{name} was not answered within {PATIENCE:g} s"
            return "left"
        try:
            response = asked.result()
        except httpx.WriteError:
            # The server has answered and closed before all of the body was written.
            return "closed"
        said = response.text[-2000:]
        assert response.status_code in (200, 400, 413, 429, 503), f"{name}: {response.status_code} {said}"
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["code"], said
            assert error["message"], said
            return f"{response.status_code} {error['code']}"
        return "200"


def no_room(status: int, said: str) -> bool:
    """Whether a request was refused because there are too many."""
    return status in (429, 503) and bool(json.loads(said)["error"]["code"])


@dataclass
class Look:
    """The server, idle after a wave."""

    state: dict[str, Any]
    sizes: dict[str, int]
    """Resident bytes by process."""


def look(server: Served, state: dict[str, Any]) -> Look:
    api = psutil.Process(server.process.pid)
    scheduler = scheduler_of(api)
    assert scheduler is not None
    return Look(state, {"api": api.memory_info().rss, "scheduler": scheduler.memory_info().rss})


async def run(server: Served, cases: list[Case], say: Callable[[str], None]) -> tuple[Soak, list[Look]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    looks: list[Look] = []
    start = time.monotonic()
    async with httpx.AsyncClient(base_url=server.address, timeout=PATIENCE, limits=limits) as client:
        soak = Soak(client, cases, random.Random(13))
        size = -(-REQUESTS // WAVES)
        for first in range(0, REQUESTS, size):
            last = min(first + size, REQUESTS)
            await soak.wave(range(first, last))
            looks.append(look(server, await until_idle(client)))
            check_books(looks[-1].state)
            sizes = ", ".join(f"{name} {size / 2**20:.0f} MB" for name, size in looks[-1].sizes.items())
            say(f"{last} of {REQUESTS} requests after {time.monotonic() - start:.0f} s; {sizes}")
    return soak, looks


def check_books(state: dict[str, Any]) -> None:
    for name in ("held_tokens", "locked_tokens", "book_errors", "failed_batches", "waiting_requests"):
        assert state[name] == 0, f"{name}: {state[name]}"
    assert state["free_tokens"] + state["cached_tokens_now"] == state["total_tokens"]
    assert state["accepted"] == state["finished"]


def check_memory(looks: list[Look]) -> None:
    """At the end, against the middle: each the least of a quarter of the second half's looks."""
    second = looks[len(looks) // 2 :]
    part = max(1, len(second) // 4)
    for name in ("api", "scheduler"):
        middle = min(one.sizes[name] for one in second[:part])
        end = min(one.sizes[name] for one in second[-part:])
        grown = (end - middle) / 2**20
        assert end - middle < max(ROOM, SHARE * middle), f"{name} grew by {grown:.0f} MB over the second half"


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = str(tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2))
    config = {**CONFIG, "model": {"path": path, "dtype": "float32", "device": "cpu", "served_name": "m"}}

    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)  # noqa: T201

    with Engine.from_config(config) as engine:
        cases = [case for case in make_cases(engine, CASES) if not case.ending]
    with serving(config) as server:
        soak, looks = asyncio.run(run(server, cases, say))
        log = server.log()
    for what, count in sorted(soak.ends.items()):
        say(f"  {what}: {count}")
    say(f"  slowest: { {name: round(seconds, 1) for name, seconds in soak.slowest.items()} }")
    say(f"  retractions: {looks[-1].state['retractions']}, aborted: {looks[-1].state['aborted']}")
    assert sum(soak.ends.values()) - soak.ends["refused for a while"] == REQUESTS, "each request has one end"
    assert soak.tipped <= 0.01 * REQUESTS
    assert looks[-1].state["retractions"] > 0, "the pool was meant to be small"
    assert "Traceback" not in log, log[-5000:]
    check_memory(looks)
