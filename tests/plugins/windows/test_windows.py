"""Windows through the whole scheduler: each request gets what it would get alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pegboard.core.interfaces.messages import AbortRequest
from pegboard.toolkit.cache.windows import most_pages
from tests.core.pipeline.harness import prompts
from tests.plugins.windows.window_harness import WindowHarness, oracle


def arrangement(rng: random.Random) -> dict[str, Any]:
    page_size, windows = rng.choice([1, 4]), rng.choice([(5,), (1,), (9,), (3, 16)])
    least = max(most_pages(window, page_size) for window in windows)
    return {
        "page_size": page_size,
        "windows": windows,
        "count": least + rng.choice([0, 1, 4, least, 3 * least, 40]),
        "cache": rng.choice(["radix", "radix", "none", "block" if page_size == 4 else "radix"]),
        "tokens": rng.choice([160, 256, 2048]),
        "chunk": rng.choice([None, 4, 16]),
        "loop": rng.choice(["normal", "overlap"]),
        "mixed_chunk": rng.random() < 0.5,
        "prefill_first": rng.random() < 0.3,
        "policy": rng.choice(["fcfs", "priority"]),
        "every": rng.choice([4, 8, 32]),
        "new_token_ratio": rng.choice([0.1, 0.7]),
    }


@pytest.mark.parametrize("seed", range(12))
def test_each_request_gets_what_it_would_get_alone(seed: int) -> None:
    play(seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(1000, 1400, 100))
def test_many_more(first: int) -> None:
    for seed in range(first, first + 100):
        play(seed)


def play(seed: int) -> WindowHarness:
    """Requests with shared prefixes, little memory, few pages, aborts, and passes that fail early or late."""
    rng, luck = random.Random(seed), random.Random(seed)
    harness = WindowHarness(**arrangement(rng))
    failing, late, lost = (rng.choice([0.0, 0.0, 0.1]) for _ in range(3))
    model = harness.paged

    def fails(work: Any) -> bool:
        if len(work.rows) > 1 and luck.random() < failing:
            model.spoil(work)
            return True
        return False

    model.fail_on, model.late = fails, lambda work: len(work.rows) > 1 and luck.random() < late
    model.lost = lambda work: len(work.rows) > 1 and luck.random() < lost
    asked = {f"r{at}": (prompt, rng.randint(1, 24)) for at, prompt in enumerate(prompts(24, seed=seed))}
    aborted = set()
    for rid, (prompt, n) in asked.items():
        harness.submit(rid, prompt, n, priority=rng.randint(0, 2))
        for _ in range(rng.randint(0, 3)):
            harness.step()
        if rng.random() < 0.1:
            harness.scheduler.receive([AbortRequest(rid=rid)])
            aborted.add(rid)
    harness.run()
    for rid, (prompt, n) in asked.items():
        if rid not in aborted:
            assert harness.tokens(rid) == oracle(harness.paged.windows, prompt, n), rid
    return harness
