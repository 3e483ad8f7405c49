"""Thousands of requests in a pool that is far too small for them, with aborts, faults and bursts all along: nothing is
lost, nothing is answered twice, every answer is right up to its end, and the books balance after every step and at
every idle. Simulated requests go through the real scheduler (`tests.e2e.soak`), real ones through a server.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import serving
from pegboard.core.engine.engine import Engine
from tests.core.pipeline.harness import Seer
from tests.e2e.soak import Soak
from tests.e2e.test_abort_storm import Case, Storm, check, make_cases, until_idle
from tests.plugins.spec_eagle.heads import Head

ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "normal": {"policy": "fcfs", "chunk": 16},
    "overlap": {"loop": "overlap", "policy": "lpm", "page_size": 4, "chunk": 32, "mixed_chunk": True},
    "priority": {"policy": "priority", "chunk": 32, "page_size": 4, "cache": "block"},
    "priority_overlap": {"loop": "overlap", "policy": "priority", "chunk": 32, "mixed_chunk": True},
    "split": {"split_prefill_layers": 2, "chunk": 32},
    "split_overlap": {"loop": "overlap", "split_prefill_layers": 2, "page_size": 4},
    "few_rows": {"loop": "overlap", "policy": "random", "chunk": 16, "page_size": 16, "cache": "block",
                 "max_running_requests": 5, "max_queued_requests": 30},
    "prefill_first": {"policy": "dfs-weight", "mixed_chunk": True, "chunk": 16, "prefill_first": True},
    "chains": {"speculator": Seer(0.7), "policy": "priority", "chunk": 16, "mixed_chunk": True},
    "trees": {"speculator": Seer(0.7, "tree"), "loop": "overlap", "chunk": 32, "page_size": 16, "cache": "block"},
    "no_cache": {"loop": "overlap", "policy": "lof", "cache": "none"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of faults on purpose would be logged with their tracebacks."""
    caplog.set_level(logging.CRITICAL + 1)


def soak(name: str, requests: int, seed: int) -> dict[str, Any]:
    """One run. The fixed seed makes it the same every time, with the overlap loop too."""
    run = Soak(seed, ARRANGEMENTS[name])
    run.run(requests)
    assert 0.5 * run.idles <= run.told_idle <= run.idles
    return run.summary()


@pytest.mark.parametrize("name", ["normal", "overlap", "priority_overlap", "split", "few_rows"])
def test_some_hundred_simulated(name: str) -> None:
    happened = soak(name, 400, seed=3)
    assert happened["idles"] >= 8
    assert happened["retractions"] >= 5
    assert happened["failed_batches"] >= 5


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_five_thousand_simulated(name: str, seed: int) -> None:
    arrangement = ARRANGEMENTS[name]
    happened = soak(name, 5000, seed)
    assert happened["idles"] >= 100
    assert happened["retractions"] >= 100
    assert happened["failed_batches"] >= 150
    assert happened["ends"]["length"] + happened["ends"]["stop"] >= 2000
    places = {"new", "waiting", "blocked", "running", "retracted", "held"}
    places |= {"chunked"} if "chunk" in arrangement else set()
    places |= {"split"} if "split_prefill_layers" in arrangement else set()
    assert {place for place, aborts in happened["aborts"].items() if aborts >= 3} == places
    calls = {"batch_scheduled", "batch_committed", "requests_finished", "order", "extend"}
    assert calls <= happened["raised"].keys()
    if "max_queued_requests" in arrangement:
        assert happened["rejected"]["queue_full"] >= 100


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["priority", "priority_overlap"])
def test_preemption_in_a_soak(name: str) -> None:
    run = Soak(7, ARRANGEMENTS[name])
    if not run.scheduler.components.policy.preempts:
        pytest.skip("the policy does not preempt")
    run.run(2000)
    assert run.summary()["preemptions"] >= 20


# ---- real requests --------------------------------------------------------------------------------------------------

REQUESTS = 500
WAVE = 60
"""Requests of one wave, about."""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("loop", "policy", "cache", "page_size", "speculation"),
    [
        ("normal", "priority", "radix", 1, {"use": "none"}),
        ("overlap", "lpm", "radix", 1, {"use": "ngram", "min_match": 1}),
        ("overlap", "priority", "block", 16, {"use": "eagle", "topk": 3}),
    ],
    ids=["none", "ngram", "eagle"],
)
def test_real_requests(
    loop: str,
    policy: str,
    cache: str,
    page_size: int,
    speculation: dict[str, Any],
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third of them aborted, or cut off midway, over HTTP; in waves, and after each the server is idle. What runs
    with the normal tests is `test_abort_storm`.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    if speculation["use"] == "eagle":
        speculation = {**speculation, "draft": str(Head().write(tmp_path))}
    config: dict[str, Any] = {
        "speculation": {"adaptive": False, "max_batch": 64, **speculation},
        "model": {
            "path": str(tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)),
            "dtype": "float32",
            "device": "cpu",
            "served_name": "m",
        },
        "attention": {"use": "torch"},
        "prefix_cache": {"use": cache},
        "memory": {"page_size": page_size, "max_total_tokens": 512},
        "scheduler": {
            "loop": loop,
            "policy": {"use": policy},
            "max_running_requests": 48,
            "chunked_prefill_size": 32,
            "mixed_chunk": page_size == 1,
            "estimate_max_new_tokens": 2,
        },
    }
    with Engine.from_config(config) as engine:
        cases = make_cases(engine, REQUESTS)
    with serving(config) as server:
        storm, states = asyncio.run(waves(server.address, cases))
        log = server.log()
    check(storm, states[-1], cases)
    for state in states:
        assert state["held_tokens"] == state["locked_tokens"] == state["book_errors"] == state["failed_batches"] == 0
        assert state["free_tokens"] + state["cached_tokens_now"] == state["total_tokens"]
        assert state["accepted"] == state["finished"]
    assert states[-1]["accepted"] <= REQUESTS + storm.repeated, "a request that was cut off early may never have come"
    assert bool(states[-1]["drafted_tokens"]) == (speculation["use"] != "none")
    assert states[-1]["retractions"] >= 5, f"the pool was meant to be small: {states[-1]['retractions']}"
    assert "Traceback" not in log, log


async def waves(address: str, cases: list[Case]) -> tuple[Storm, list[dict[str, Any]]]:
    """The requests in waves; the scheduler's state at the idle after each."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    states = []
    async with httpx.AsyncClient(base_url=address, timeout=240, limits=limits) as client:
        storm = Storm(client)
        cuts = [*range(0, len(cases), WAVE), len(cases)]
        for start, stop in itertools.pairwise(cuts):
            await storm.run(cases[start:stop])
            states.append(await until_idle(client))
    return storm, states
