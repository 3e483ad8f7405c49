"""The scheduler against a fake model whose answers depend on every slot of a request's row."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.conformance.covering import covering
from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.messages import AbortRequest, Accepted, ControlRequest, Rejected
from pegboard.core.interfaces.req import NO_ROW
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.pipeline.batch_result import BatchResult
from pegboard.core.pipeline.executor import InlineExecutor
from pegboard.core.pipeline.stages import StepHooks
from tests.core.pipeline.harness import EOS, VOCAB, Harness, oracle


def prompts(n: int, *, seed: int = 0, shortest: int = 1, longest: int = 60) -> list[list[int]]:
    """Mixed prompts, half of which share a prefix with another one."""
    rng = random.Random(seed)
    out: list[list[int]] = []
    for i in range(n):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(shortest, longest))]
        base = rng.choice(out)[: rng.randint(0, longest)] if out and i % 2 else []
        out.append((base + own)[: longest * 2])
    return out


def test_one_request() -> None:
    harness = Harness()
    assert isinstance(harness.submit("a", [1, 2, 3], 5), Accepted)
    harness.run()
    assert harness.tokens("a") == oracle([1, 2, 3], 5)
    assert harness.finish("a")["type"] in {"length", "stop"}
    assert len(harness.outputs["a"]) == 1, "a request that does not stream is answered once"


def test_streams_every_token_once() -> None:
    harness = Harness()
    harness.submit("a", [5, 6, 7], 6, stream=True, sampling={"ignore_eos": True})
    harness.run()
    assert [len(output.token_ids) for output in harness.outputs["a"]] == [1] * 6
    assert harness.tokens("a") == oracle([5, 6, 7], 6, ignore_eos=True)


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


def test_chunks_are_bounded_and_alternate_with_decodes() -> None:
    harness = Harness(chunk=16)
    harness.submit("running", [1, 2], 40, sampling={"ignore_eos": True})
    harness.step()
    harness.submit("long", list(range(100)), 4)
    harness.run()
    modes = [work.forward_mode for work in harness.model.batches[1:14]]
    extends = [work for work in harness.model.batches if work.forward_mode is ForwardMode.EXTEND]
    assert max(int(work.extend_lens.sum()) for work in extends) <= 16
    assert not any(a is b is ForwardMode.EXTEND for a, b in itertools.pairwise(modes)), "a running request starved"
    assert harness.tokens("long") == oracle(list(range(100)), 4)


def test_prefill_first_restores_the_reference_order() -> None:
    harness = Harness(chunk=16, prefill_first=True)
    harness.submit("running", [1, 2], 40, sampling={"ignore_eos": True})
    harness.step()
    harness.submit("long", list(range(100)), 4)
    harness.run()
    modes = [work.forward_mode for work in harness.model.batches[1:8]]
    assert modes == [ForwardMode.EXTEND] * 7


def test_mixed_chunk_carries_decodes() -> None:
    harness = Harness(chunk=16, mixed_chunk=True)
    harness.submit("running", [1, 2], 40, sampling={"ignore_eos": True})
    harness.step()
    harness.submit("long", list(range(100)), 4)
    harness.run()
    mixed = [work for work in harness.model.batches if work.forward_mode is ForwardMode.MIXED]
    assert len(mixed) >= 6
    assert all(int(work.extend_lens.sum()) <= 16 for work in mixed)


def test_limits_running_requests() -> None:
    harness = Harness(max_running_requests=3)
    for i in range(10):
        harness.submit(f"r{i}", [i, i + 1], 6)
    harness.run()
    assert max(len(work.rows) for work in harness.model.batches) == 3


def test_queue_limit_answers_503() -> None:
    harness = Harness(max_running_requests=3, max_queued_requests=2)
    replies = [harness.submit(f"r{i}", [1], 1) for i in range(6)]
    assert [isinstance(one, Rejected) for one in replies] == [False] * 5 + [True]
    assert (replies[5].status, replies[5].code) == (503, "queue_full")


def test_token_limit_counts_what_memory_does_not_hold() -> None:
    harness = Harness(max_queued_tokens=100, max_context_len=64)
    places = (harness.scheduler.stages.memory.total_tokens + 100) // 60
    replies = [harness.submit(f"r{i}", [1] * 60, 1) for i in range(places + 1)]
    assert [isinstance(one, Rejected) for one in replies] == [False] * places + [True]
    assert (replies[-1].status, replies[-1].code) == (503, "queue_full")
    harness.run()
    assert not isinstance(harness.submit("later", [1] * 60, 1), Rejected)


@pytest.mark.parametrize(
    ("length", "code"), [(0, "empty_prompt"), (1024, "context_length_exceeded"), (2000, "context_length_exceeded")]
)
def test_refuses_what_cannot_be_served(length: int, code: str) -> None:
    reply = Harness().submit("a", [1] * length, 1)
    assert isinstance(reply, Rejected)
    assert (reply.status, reply.code, reply.param) == (400, code, "prompt")
    if length:
        assert f"prompt is too long: {length} tokens > 1023 maximum; this model's maximum context" in reply.message


def test_refuses_more_tokens_than_a_row_holds() -> None:
    """Intake clips them, but by what it knew of this scheduler's predecessor when that one ended meanwhile."""
    harness = Harness(max_context_len=32)
    harness.submit("good", [1, 2], 30, sampling={"ignore_eos": True})
    reply = harness.submit("a", [3, 4], 31)
    harness.run()
    assert isinstance(reply, Rejected)
    assert (reply.status, reply.code, reply.param) == (400, "context_length_exceeded", "max_new_tokens")
    assert reply.message == (
        "prompt is too long: 2 tokens > 1 maximum; this model's maximum context length is 32 tokens, and "
        "max_new_tokens asks for 31 of them"
    )
    assert len(harness.tokens("good")) == 30


def test_longest_prompt_is_served() -> None:
    harness = Harness()
    harness.submit("a", [1] * 1023, 1)
    harness.run()
    assert harness.tokens("a") == oracle([1] * 1023, 1)


def test_duplicate_rid_is_refused_and_harms_nobody() -> None:
    harness = Harness()
    harness.submit("a", [1, 2], 3)
    reply = harness.submit("a", [9], 3)
    assert isinstance(reply, Rejected)
    assert reply.code == "duplicate_rid"
    harness.run()
    assert harness.tokens("a") == oracle([1, 2], 3)


def test_max_new_tokens_zero_only_fills_the_cache() -> None:
    harness = Harness()
    harness.submit("a", list(range(10)), 0)
    harness.run()
    assert harness.tokens("a") == []
    assert harness.finish("a")["type"] == "length"
    assert harness.memory.cache.cached_tokens == 10


def test_eos_and_stop_ids_end_an_output() -> None:
    harness = Harness()
    want = oracle([3, 4], 20, ignore_eos=True)
    stop = want[4]
    harness.submit("a", [3, 4], 20, sampling={"ignore_eos": True, "stop_token_ids": (stop,)})
    harness.run()
    assert harness.tokens("a") == want[: want.index(stop) + 1]
    assert harness.finish("a") == {"type": "stop", "matched": stop}
    assert EOS not in harness.tokens("a")


@pytest.mark.parametrize(("least", "length"), [(0, 3), (3, 3), (4, 6)])
def test_a_stop_string_before_min_new_tokens_is_text(least: int, length: int) -> None:
    harness = Harness(tokenizer=FakeTokenizer())
    script = iter("abcabcabc")
    harness.scheduler.stages.executor = InlineExecutor(
        lambda work: BatchResult(np.array([ord(next(script))], np.int64))
    )
    harness.submit("a", [3, 4], 9, sampling={"stop": ("bc",), "min_new_tokens": least})
    harness.run()
    assert len(harness.tokens("a")) == length
    assert harness.finish("a") == {"type": "stop", "matched": "bc"}


def status_of(harness: Harness, rid: str) -> ReqStatus:
    return harness.scheduler.requests.alive[rid].status


@pytest.mark.parametrize("when", ["waiting", "chunked", "running", "retracted"])
def test_abort_frees_everything_within_one_step(when: str) -> None:
    harness = Harness(chunk=16, page_size=4, tokens=256)
    harness.submit("other", [1, 2, 3], 30, sampling={"ignore_eos": True})
    harness.step()
    harness.submit("victim", list(range(100)), 30)
    for _ in range({"waiting": 0, "chunked": 3, "running": 14, "retracted": 14}[when]):
        harness.step()
    req = harness.scheduler.requests.alive["victim"]
    if when == "retracted":
        harness.scheduler.planner.retract(req)
    assert {"waiting": req.status is ReqStatus.WAITING, "chunked": harness.scheduler.chunked is req}.get(
        when, req.status.value == when
    )
    harness.scheduler.receive([AbortRequest(rid="victim")])
    assert req.kv.row == NO_ROW
    assert req.kv.handle is None
    harness.step()
    assert harness.finish("victim")["type"] == "abort"
    harness.run()
    assert harness.tokens("other") == oracle([1, 2, 3], 30, ignore_eos=True)


def test_abort_all_and_unknown() -> None:
    harness = Harness()
    for i in range(5):
        harness.submit(f"r{i}", [i], 50)
    harness.step()
    harness.scheduler.receive([AbortRequest(rid="nobody"), AbortRequest(all_requests=True)])
    harness.run()
    assert all(harness.finish(f"r{i}")["type"] == "abort" for i in range(5))


def test_failed_batch_fails_its_requests_only() -> None:
    harness = Harness()
    harness.submit("bad", [100, 101], 5)
    harness.model.fail_on = lambda work: 100 in work.input_ids
    harness.run()
    assert harness.finish("bad")["type"] == "abort"
    assert "out of luck" in harness.finish("bad")["message"]
    assert harness.memory.cache.cached_tokens == 0, "KV of a failed pass must not be shared"
    harness.submit("good", [1, 2], 5)
    harness.run()
    assert harness.tokens("good") == oracle([1, 2], 5)


def test_flush_cache_only_when_idle() -> None:
    harness = Harness()
    harness.submit("a", list(range(20)), 3)
    harness.step()
    (busy,) = harness.scheduler.receive([ControlRequest(call_id=1, action="flush_cache")])
    harness.run()
    (done,) = harness.scheduler.receive([ControlRequest(call_id=2, action="flush_cache")])
    assert not busy.ok  # type: ignore[union-attr]
    assert done.ok  # type: ignore[union-attr]
    assert harness.memory.cache.cached_tokens == 0
    assert harness.memory.allocator.free_tokens == harness.memory.total_tokens


def test_draining_refuses_newcomers() -> None:
    harness = Harness()
    harness.submit("a", [1], 3)
    harness.scheduler.receive([ControlRequest(call_id=1, action="drain")])
    reply = harness.submit("b", [1], 3)
    assert isinstance(reply, Rejected)
    assert reply.status == 503
    harness.run()
    assert harness.tokens("a") == oracle([1], 3)


def test_unknown_control_action_is_answered() -> None:
    (reply,) = Harness().scheduler.receive([ControlRequest(call_id=1, action="dance")])
    assert not reply.ok  # type: ignore[union-attr]


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


def test_what_a_hook_leaves_with_a_batch_reaches_the_worker() -> None:
    harness = Harness(hooks=StepHooks(batch_scheduled=(lambda batch: batch.extras.update({"acme.note": batch.bid}),)))
    harness.submit("a", [1, 2], 2, sampling={"ignore_eos": True})
    harness.run()
    assert [work.extras for work in harness.model.batches] == [{"acme.note": 1}, {"acme.note": 2}]


def test_a_request_as_large_as_the_pool_gets_through() -> None:
    harness = Harness(page_size=4, tokens=64, chunk=16, max_context_len=4096)
    others = prompts(6, longest=10)
    for i, prompt in enumerate(others):
        harness.submit(f"r{i}", prompt, 10)
    harness.submit("big", list(range(50)), 14, sampling={"ignore_eos": True})
    harness.run()
    assert harness.tokens("big") == oracle(list(range(50)), 14, ignore_eos=True)
    assert all(harness.tokens(f"r{i}") == oracle(prompt, 10) for i, prompt in enumerate(others))


@settings(max_examples=60, deadline=None)
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
    assert info["free_tokens"] + info["cached_tokens_now"] == info["total_tokens"]
    assert np.isclose(info["new_token_ratio"], 0.7)
