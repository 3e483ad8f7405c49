"""What the host has of a prompt is loaded with the step that reads it, and counts as computed once it is committed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from pegboard.core.interfaces.messages import AbortRequest
from pegboard.plugins.kv_tiers.api import PageLoad
from tests.core.pipeline.harness import VOCAB, oracle
from tests.core.pipeline.tier_harness import TierHarness, loads_of

RANDOM = random.Random(7)
LONG = [RANDOM.randrange(VOCAB) for _ in range(48)]
OTHER = [RANDOM.randrange(VOCAB) for _ in range(60)]
WORKLOADS: dict[str, dict[str, Any]] = {
    "normal": {},
    "overlap": {"loop": "overlap"},
    "chunks": {"chunk": 16},
    "mixed": {"chunk": 16, "mixed_chunk": True, "loop": "overlap"},
    "split": {"split_prefill_layers": 2},
    "split overlap": {"split_prefill_layers": 2, "chunk": 16, "loop": "overlap"},
}


def conversations(count: int, turns: int, rng: random.Random) -> list[list[list[int]]]:
    """Prompts of chats, each of which begins with the one before."""
    found = []
    for _ in range(count):
        prompt: list[int] = []
        chat = []
        for _ in range(turns):
            prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(6, 24))]
            chat.append(prompt)
        found.append(chat)
    return found


def onto_the_host(harness: TierHarness, prompt: Sequence[int] = LONG) -> None:
    """Have a prompt computed and saved, and its pages evicted."""
    harness.submit("first", prompt, 2)
    harness.run()
    harness.share = 1.0
    while harness.mover.jobs or harness.memory.cache.busy:
        harness.step()
    harness.memory.cache.evict(1_000_000)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", WORKLOADS)
def test_any_traffic_gets_the_right_tokens(name: str, page_size: int) -> None:
    """Chats that come back when the device has long forgotten them, with failed steps and loads, and with aborts."""
    rng = random.Random(len(name))
    workload = {"tokens": 192, "max_context_len": 160, **WORKLOADS[name]}
    harness = TierHarness(2048, page_size=page_size, fail_loads=0.05, **workload)
    harness.model.fail_on = lambda work: rng.random() < 0.03
    chats = conversations(16, 3, rng)
    asked: dict[str, list[int]] = {}
    for turn in range(3):
        for number, chat in enumerate(chats):
            rid = f"{number} {turn}"
            harness.submit(rid, chat[turn], 4, sampling={"ignore_eos": True})
            asked[rid] = chat[turn]
            for _ in range(rng.randint(0, 3)):
                harness.step()
            if rng.random() < 0.1:
                harness.scheduler.receive([AbortRequest(rid=rid)])
        harness.run()
    for rid, prompt in asked.items():
        if harness.finish(rid)["type"] == "length":
            assert harness.tokens(rid) == oracle(prompt, 4, ignore_eos=True), rid
    hit = harness.scheduler.counters.cached_tokens
    assert sum(harness.loads) > hit / 3 > 0
    assert harness.memory.guarded.failures <= harness.scheduler.counters.failed_batches


def test_a_prefix_comes_from_the_host_once_and_is_on_the_device_then() -> None:
    harness = TierHarness(256, tokens=128)
    onto_the_host(harness)
    batches = len(harness.model.batches)
    for rid in ("a", "b", "c"):
        harness.submit(rid, [*LONG, ord(rid)], 3)
    harness.run()
    assert harness.loads == [48], "requests with one prefix load it for each of them"
    prefills = [work for work in harness.model.batches[batches:] if not work.forward_mode.is_decode]
    assert [work.prefix_lens.tolist() for work in prefills] == [[48], [48, 48]], "the first one loads for the others"
    for rid in ("a", "b", "c"):
        assert harness.tokens(rid) == oracle([*LONG, ord(rid)], 3)
        assert harness.tokens(rid)


def test_what_is_loaded_is_counted_as_cached() -> None:
    harness = TierHarness(256, tokens=128)
    onto_the_host(harness)
    harness.submit("again", LONG, 2)
    harness.run()
    assert harness.outputs["again"][-1].cached_tokens == 47


def test_loads_have_a_budget_of_their_own() -> None:
    harness = TierHarness(512, tokens=256, max_load_tokens=50)
    for number, prompt in enumerate((LONG, OTHER, [9, *LONG])):
        harness.submit(f"before {number}", prompt, 2)
    harness.run()
    harness.share = 1.0
    while harness.mover.jobs or harness.memory.cache.busy:
        harness.step()
    harness.memory.cache.evict(1_000_000)
    batches = len(harness.model.batches)
    for number, prompt in enumerate((LONG, OTHER, [9, *LONG])):
        harness.submit(f"again {number}", prompt, 2)
    harness.run()
    together = [len(loads) for work in harness.model.batches[batches:] if (loads := loads_of(work))]
    assert together == [1, 1, 1], "more is loaded at once than max_load_tokens"
    assert 59 in harness.loads, "a prefix longer than the budget is never loaded"


def test_a_cache_that_fails_to_load_is_soon_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = TierHarness(256, tokens=128)
    onto_the_host(harness)
    tried = []

    def load(handle: object, slots: object) -> PageLoad:
        tried.append(slots)
        raise OSError("no host")

    monkeypatch.setattr(harness.memory.cache, "load", load)
    harness.submit("again", LONG, 3)
    harness.run()
    assert harness.tokens("again") == oracle(LONG, 3)
    assert len(tried) == 10
    assert harness.outputs["again"][-1].cached_tokens == 0


def test_a_load_that_is_lost_costs_no_request() -> None:
    harness = TierHarness(256, tokens=128, fail_loads=1.0)
    onto_the_host(harness)
    harness.submit("running", OTHER, 12)
    harness.step()
    harness.submit("again", LONG, 3)
    harness.run()
    for rid, prompt, count in (("running", OTHER, 12), ("again", LONG, 3)):
        assert harness.tokens(rid) == oracle(prompt, count)
    assert len(harness.loads) == 10, "loads that fail are tried for ever"
