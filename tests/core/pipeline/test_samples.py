"""Requests that sample nothing: they end with their prompt and never join the running ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.pipeline.harness import IGNORE, Harness, oracle


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("more", [{}, {"chunk": 8}, {"chunk": 8, "mixed_chunk": True}, {"split_prefill_layers": 2}])
def test_they_end_with_their_prompt(loop: str, more: dict[str, Any]) -> None:
    harness = Harness(loop=loop, **more)
    harness.submit("runs", [1, 2], 30, **IGNORE)
    harness.step()
    harness.submit("fills", list(range(50)), 5)
    harness.scheduler.requests.alive["fills"].samples = False
    while "fills" not in harness.outputs:
        harness.step()
        assert "fills" not in [req.rid for req in harness.scheduler.running]
    assert harness.finish("fills")["type"] == "length"
    assert harness.tokens("fills") == []
    harness.run()
    assert harness.tokens("runs") == oracle([1, 2], 30, ignore_eos=True)
    assert harness.memory.cache.cached_tokens >= 50
