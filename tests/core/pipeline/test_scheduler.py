"""The scheduler against a fake model whose answers depend on every slot of a request's row."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.conformance.covering import covering
from pegboard.core.interfaces.messages import AbortRequest, Accepted
from pegboard.core.interfaces.req import ReqTiming
from pegboard.core.pipeline.components import StepHooks
from tests.core.pipeline.harness import Harness, oracle, prompts


def test_one_request() -> None:
    harness = Harness()
    assert isinstance(harness.submit("a", [1, 2, 3], 5), Accepted)
    harness.run()
    assert harness.tokens("a") == oracle([1, 2, 3], 5)
    assert harness.finish("a")["type"] in {"length", "stop"}
    assert len(harness.outputs["a"]) == 1, "a request that does not stream is answered once"


ROOMY, TIGHT = 4096, 224
MATRIX = list(
    itertools.product(
        ("radix", "block", "none"), (1, 4, 16), (None, 16), (False, True), (ROOMY, TIGHT), ("normal", "overlap")
    )
)
PAIRS = covering(MATRIX)
TRIPLES = [pytest.param(*case, marks=pytest.mark.full) for case in covering(MATRIX, 3, beside=PAIRS)]


@pytest.mark.parametrize(("cache", "page_size", "chunk", "mixed", "tokens", "loop"), [*PAIRS, *TRIPLES])
def test_same_tokens_in_every_arrangement(
    cache: str, page_size: int, chunk: int | None, mixed: bool, tokens: int, loop: str
) -> None:
    # In the tight pool, admission reckons with next to no growth, so that running requests have to be retracted.
    estimate = 1 if tokens == TIGHT else 4096
    # Those are admitted only once it is certain that none has to be retracted for them.
    ignoring = 3 if tokens == ROOMY else 8
    harness = Harness(
        loop=loop,
        cache=cache,
        page_size=page_size,
        tokens=tokens,
        chunk=chunk,
        mixed_chunk=mixed,
        estimate_max_new_tokens=estimate,
    )
    asked = prompts(24, seed=page_size)
    for i, prompt in enumerate(asked):
        harness.submit(f"r{i}", prompt, 30, stream=bool(i % 2), sampling={"ignore_eos": i % ignoring == 0})
        if i % 5 == 0:
            harness.step()
    harness.run()
    for i, prompt in enumerate(asked):
        assert harness.tokens(f"r{i}") == oracle(prompt, 30, ignore_eos=i % ignoring == 0), f"request {i}"
    if tokens == TIGHT:
        assert harness.scheduler.counters.retractions > 0, "the pool was meant to be too small"


@pytest.mark.parametrize("policy", ["fcfs", "lof", "random", "priority", "lpm", "dfs-weight"])
def test_same_tokens_under_every_policy(policy: str) -> None:
    harness = Harness(policy=policy, page_size=4, tokens=256, chunk=32)
    asked = prompts(40, seed=3)
    for i, prompt in enumerate(asked):
        harness.submit(f"r{i}", prompt, 10, priority=i % 3)
    harness.run()
    for i, prompt in enumerate(asked):
        assert harness.tokens(f"r{i}") == oracle(prompt, 10)


def test_reports_cached_tokens() -> None:
    harness = Harness(page_size=4)
    prompt = list(range(40))
    for rid in ("first", "again"):
        harness.submit(rid, prompt, 4)
        harness.run()
    assert harness.outputs["first"][-1].cached_tokens == 0
    # 39 tokens may match (one is left to compute), in whole pages of 4.
    assert harness.outputs["again"][-1].cached_tokens == 36
    assert harness.tokens("first") == harness.tokens("again")


def test_namespaces_share_nothing() -> None:
    harness = Harness()
    for rid, namespace in (("a", "x"), ("b", "y"), ("c", "x")):
        harness.submit(rid, list(range(20)), 2, namespace=namespace)
        harness.run()
    assert [harness.outputs[rid][-1].cached_tokens for rid in "abc"] == [0, 0, 19]


def test_prompts_of_one_batch_share_after_the_first_prefill() -> None:
    """A prompt is shared as soon as it is computed, not only when its request has finished."""
    harness = Harness()
    harness.submit("long", list(range(50)), 40, sampling={"ignore_eos": True})
    harness.step()
    harness.submit("late", list(range(50)), 1)
    harness.run()
    assert harness.outputs["late"][-1].cached_tokens == 49


def test_step_hooks_see_batches() -> None:
    seen: list[tuple[str, object]] = []
    hooks = StepHooks(
        batch_scheduled=(lambda batch: seen.append(("scheduled", len(batch))),),
        batch_committed=(lambda batch: seen.append(("committed", len(batch))),),
        requests_finished=(lambda reqs: seen.append(("finished", [r.rid for r in reqs])),),
        idle=(lambda: seen.append(("idle", None)),),
    )
    harness = Harness(hooks=hooks)
    harness.submit("a", [1, 2], 1)
    harness.run()
    harness.step()
    harness.step()
    assert seen == [("scheduled", 1), ("committed", 1), ("finished", ["a"]), ("idle", None)]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("aborted", [False, True])
def test_finished_requests_know_when_their_last_token_came(tokens: int, aborted: bool) -> None:
    seen: list[ReqTiming] = []
    harness = Harness(hooks=StepHooks(requests_finished=(lambda reqs: seen.extend(replace(r.timing) for r in reqs),)))
    harness.submit("a", [1, 2], 100 if aborted else tokens, sampling={"ignore_eos": True})
    if aborted:
        for _ in range(tokens):
            harness.step()
        harness.scheduler.receive([AbortRequest(rid="a")])
    harness.run()
    [times] = seen
    assert 0 < times.first_token <= times.last_token <= times.finished
    assert (times.first_token == times.last_token) == (tokens == 1)
    assert aborted or times.last_token == times.finished


@settings(max_examples=40, deadline=None)
@given(
    cache=st.sampled_from(["radix", "block", "none"]),
    page_size=st.sampled_from([1, 4]),
    chunk=st.sampled_from([None, 8, 32]),
    mixed=st.booleans(),
    tokens=st.sampled_from([128, 192, 2048]),
    seed=st.integers(0, 10_000),
    loop=st.sampled_from(["normal", "overlap"]),
    bad_luck=st.sampled_from([0.0, 0.2]),
    split=st.sampled_from([0, 1, 4]),
)
def test_storm(
    cache: str,
    page_size: int,
    chunk: int | None,
    mixed: bool,
    tokens: int,
    seed: int,
    loop: str,
    bad_luck: float,
    split: int,
) -> None:
    """Random arrivals, aborts and failing forward passes in a small pool: nothing lost, nothing answered twice, every
    answer right.
    """
    rng = random.Random(seed)
    harness = Harness(
        cache=cache,
        page_size=page_size,
        chunk=chunk,
        mixed_chunk=mixed,
        tokens=tokens,
        policy="lpm",
        loop=loop,
        split_prefill_layers=split,
    )
    asked = prompts(20, seed=seed, longest=40)
    aborted = set()
    luck = random.Random(seed + 1)
    # A pass over several requests fails now and then; none of them is to blame, so all go on.
    harness.model.fail_on = lambda work: len(work.rows) > 1 and luck.random() < bad_luck
    for i, prompt in enumerate(asked):
        harness.submit(f"r{i}", prompt, rng.randint(0, 25), stream=rng.random() < 0.5)
        for _ in range(rng.randint(0, 3)):
            harness.step()
        if rng.random() < 0.3:
            victim = f"r{rng.randint(0, i)}"
            if victim in harness.scheduler.requests.alive:
                aborted.add(victim)
            harness.scheduler.receive([AbortRequest(rid=victim)])
    harness.run()
    for i, prompt in enumerate(asked):
        got = harness.tokens(f"r{i}")
        assert got == oracle(prompt, len(got), ignore_eos=True)
        assert (harness.finish(f"r{i}")["type"] == "abort") == (f"r{i}" in aborted)


def test_counters_add_up() -> None:
    harness = Harness()
    for i in range(4):
        harness.submit(f"r{i}", [i, 1, 2], 3, sampling={"ignore_eos": True})
    harness.run()
    info = harness.scheduler.info()
    assert (info["accepted"], info["finished"], info["generated_tokens"], info["prompt_tokens"]) == (4, 4, 12, 12)
    assert info["free_tokens"] + info["cached_tokens_now"] == info["total_tokens"]  # type: ignore[operator]
    assert np.isclose(info["new_token_ratio"], 0.7)  # type: ignore[call-overload]
