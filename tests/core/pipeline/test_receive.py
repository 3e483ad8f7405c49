"""What the scheduler accepts, what it refuses, and what it answers to orders."""

from __future__ import annotations

import pytest

from pegboard.core.interfaces.messages import ControlRequest, Rejected
from tests.core.pipeline.harness import Harness, oracle


def test_queue_limit_answers_503() -> None:
    harness = Harness(max_running_requests=3, max_queued_requests=2)
    replies = [harness.submit(f"r{i}", [1], 1) for i in range(6)]
    assert [isinstance(one, Rejected) for one in replies] == [False] * 5 + [True]
    assert (replies[5].status, replies[5].code) == (503, "queue_full")


def test_token_limit_counts_what_memory_does_not_hold() -> None:
    harness = Harness(max_queued_tokens=100, max_context_len=64)
    places = (harness.scheduler.components.memory.total_tokens + 100) // 60
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
