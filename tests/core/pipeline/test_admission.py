"""Admission: how many requests run, and what they may take of memory."""

from __future__ import annotations

from tests.core.pipeline.harness import Harness, oracle, prompts


def test_limits_running_requests() -> None:
    harness = Harness(max_running_requests=3)
    for i in range(10):
        harness.submit(f"r{i}", [i, i + 1], 6)
    harness.run()
    assert max(len(work.rows) for work in harness.model.batches) == 3


def test_a_request_as_large_as_the_pool_gets_through() -> None:
    harness = Harness(page_size=4, tokens=64, chunk=16, max_context_len=4096)
    others = prompts(6, longest=10)
    for i, prompt in enumerate(others):
        harness.submit(f"r{i}", prompt, 10)
    harness.submit("big", list(range(50)), 14, sampling={"ignore_eos": True})
    harness.run()
    assert harness.tokens("big") == oracle(list(range(50)), 14, ignore_eos=True)
    assert all(harness.tokens(f"r{i}") == oracle(prompt, 10) for i, prompt in enumerate(others))
