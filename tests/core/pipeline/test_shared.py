"""What all running requests share is found where it is there, and never where it is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pegboard.core.pipeline.shared import CommonPrefix
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from tests.core.pipeline.harness import Harness, oracle


def plain(rows: ReqToTokenPool, running: Any, page: int, least: int) -> int:
    most = (int(running.known_lens.min()) - 1) // page * page
    if len(running.rows) < 2:
        return 0
    for pages in range(most // page, -1, -1):
        table = rows.host[running.rows, : pages * page]
        if (table == table[:1]).all():
            saved = pages * page * (len(running.rows) - 1)
            return pages * page if saved >= least else 0
    raise AssertionError("nothing is always in common")


@pytest.mark.parametrize("least", [1, 40, 2000])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_it_is_what_a_plain_search_finds(page: int, least: int) -> None:
    """For tables that part at any place, also far behind the first look."""
    rng = np.random.default_rng(page)
    rows = ReqToTokenPool(6, 2048, page)
    found = CommonPrefix(rows, page, least)
    for version in range(200):
        count, parts = int(rng.integers(1, 6)), int(rng.choice([0, 1, 7, 200, 2000]))
        chosen = rng.permutation(np.arange(1, 7))[:count]
        rows.host[1:] = np.arange(2048)
        for row in chosen[1:]:
            rows.host[row, int(rng.integers(0, parts + 1)) :] += 1
        known_lens = rng.integers(1, 2049, count)
        running: Any = SimpleNamespace(rows=chosen, known_lens=known_lens, version=version)
        assert found.of(running) == plain(rows, running, page, least)


def test_it_is_looked_for_when_the_batch_changes_only() -> None:
    rows = ReqToTokenPool(2, 64, 4)
    rows.host[1:] = np.arange(64)
    found = CommonPrefix(rows, 4)
    running: Any = SimpleNamespace(rows=np.array([1, 2]), known_lens=np.array([10, 20]), version=1)
    assert found.of(running) == 8
    rows.host[2] = 0
    assert found.of(running) == 8
    running.version = 2
    assert found.of(running) == 0


def test_it_counts_for_what_all_but_one_need_not_read() -> None:
    rows = ReqToTokenPool(3, 64, 4)
    rows.host[1:] = np.arange(64)
    found = CommonPrefix(rows, 4, 40)
    running: Any = SimpleNamespace(rows=np.array([1, 2]), known_lens=np.array([21, 40]), version=1)
    assert found.of(running) == 0, "20 tokens, for one of two"
    running = SimpleNamespace(rows=np.array([1, 2, 3]), known_lens=np.array([21, 40, 22]), version=2)
    assert found.of(running) == 20


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_requests_of_one_prompt_share_it(loop: str) -> None:
    """The harness checks in each step that what is said to be shared is."""
    harness = Harness(loop=loop, page_size=4)
    prompt = list(range(20, 60))
    for rid, end in (("a", [1]), ("b", [2, 3]), ("c", [4, 5, 6])):
        harness.submit(rid, prompt + end, n=12, sampling={"ignore_eos": True})
        harness.step()
        harness.step()
    harness.run()
    for rid, end in (("a", [1]), ("b", [2, 3]), ("c", [4, 5, 6])):
        assert harness.tokens(rid) == oracle(prompt + end, 12, ignore_eos=True)
    assert max(work.common_prefix for work in harness.model.batches) == 40
