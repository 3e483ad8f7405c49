"""The queue is bounded, by default too: what waits, what does not count as waiting, and what is never refused."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.frontend import intake
from pegboard.core.frontend.prompts import LONG_IDS
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import Accepted, Rejected, TokenizedBatch, TokenizedRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.server.client import AsyncEngineClient
from pegboard.core.server.scheduler_process import MAX_QUEUED_FILLS, MAX_QUEUED_REQUESTS
from tests.core.pipeline.harness import Harness
from tests.faults.stage import play, submitted


def request(rid: str, length: int) -> TokenizedRequest:
    sampling = SamplingParams(max_new_tokens=2, temperature=0.0)
    return TokenizedRequest(rid=rid, prompt=intake.pack_ids([1] * length), sampling=sampling)


def batch(harness: Harness, name: str, count: int, length: int = 1) -> list[bool]:
    """Whether each of a batch's requests is accepted; a refusal says that the queue is full."""
    message = TokenizedBatch(requests=[request(f"{name}{i}", length) for i in range(count)])
    replies = harness.scheduler.receive([message])
    for one in replies:
        if isinstance(one, Rejected):
            assert (one.status, one.code) == (503, "queue_full")
    return [isinstance(one, Accepted) for one in replies]


def singles(harness: Harness, count: int, length: int = 1) -> int:
    """How many of these, each alone, are accepted."""
    return sum(sum(batch(harness, f"single{i}-", 1, length)) for i in range(count))


def test_a_server_has_bounds_by_default() -> None:
    """What it tells its scheduler; a served one's bounds are read in test_served_faults.py."""
    harness = Harness(tokens=4096)
    assert harness.scheduler.info()["max_queued_tokens"] is None
    harness.scheduler.bounds.set_open(MAX_QUEUED_REQUESTS, MAX_QUEUED_FILLS)
    info = harness.scheduler.info()
    assert (info["max_queued_requests"], info["max_queued_tokens"]) == (2048, 16 * 4096)
    assert singles(harness, 100, length=1000) == 17 * 4096 // 1000


def test_only_what_no_place_is_free_for_waits() -> None:
    harness = Harness(max_running_requests=8, max_queued_requests=4)
    assert singles(harness, 30) == 12
    harness.run()
    assert len(harness.outputs) == 12
    assert singles(harness, 30) == 12


@pytest.mark.parametrize(
    ("bounds", "count", "length"),
    [({"most_requests": 12}, 12, 1), ({"most_tokens": 6400}, 64, 100)],
    ids=["requests", "tokens"],
)
def test_a_batch_that_could_never_be_taken_is_refused_for_good(bounds: dict[str, int], count: int, length: int) -> None:
    """With 400, where 503 would have its client try again for ever; nothing is sent."""

    async def scene(client: AsyncEngineClient, wire: Any) -> None:
        def asked(name: str, number: int) -> list[GenerateRequest]:
            return [GenerateRequest(prompt=[5] * length, rid=f"{name}{i}") for i in range(number)]

        with pytest.raises(InvalidRequest) as refused:
            await client.submit_all(asked("more", count + 1))
        assert (refused.value.status, refused.value.code) == (400, "batch_too_large")
        assert str(count + 1 if length == 1 else (count + 1) * length) in str(refused.value)
        assert not wire.sent
        answers = await submitted(client, wire, *asked("most", count))
        await answers.aclose()

    play(scene, info=dataclasses.replace(FakeEngineClient().info, **bounds))  # type: ignore[arg-type]


def test_the_api_process_knows_what_may_be_taken() -> None:
    """An empty queue takes the largest batch that the API process lets through, and not a token more."""
    harness = Harness(tokens=512, max_running_requests=8, max_queued_requests=56)
    bounds = harness.scheduler.bounds
    bounds.set_open(MAX_QUEUED_REQUESTS, MAX_QUEUED_FILLS)
    assert (bounds.most_requests, bounds.most_tokens) == (64, 17 * 512)
    assert batch(harness, "whole", 64, 17 * 8) == [True] * 64
    assert singles(harness, 1) == 0
    harness.run()
    assert len(harness.outputs) == 64
    assert batch(harness, "more", 65) == [True] * 64 + [False]


@pytest.mark.parametrize(("length", "beside"), [(LONG_IDS + 1, True), (LONG_IDS, False)])
def test_long_lists_of_ids_are_prepared_beside_the_loop(
    length: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    check, pack = intake.Intake._check_prompt, intake.pack_ids

    def noted_check(self: intake.Intake, ids: Sequence[int]) -> None:
        threads.append(threading.get_ident())
        check(self, ids)

    def noted_pack(ids: Sequence[int]) -> bytes:
        threads.append(threading.get_ident())
        return pack(ids)

    monkeypatch.setattr(intake.Intake, "_check_prompt", noted_check)
    monkeypatch.setattr(intake, "pack_ids", noted_pack)

    async def scene(client: AsyncEngineClient, wire: Any) -> None:
        prompt = [5] * length
        answers = await submitted(client, wire, *[GenerateRequest(prompt=prompt, rid=f"r{i}") for i in range(3)])
        # Once each for all three.
        assert [one != threading.get_ident() for one in threads] == [beside] * 2
        assert [len(one.prompt) for one in wire.sent] == [4 * length] * 3
        await answers.aclose()

    play(scene, info=dataclasses.replace(FakeEngineClient().info, max_context_len=2**17, max_total_tokens=2**17))
