"""Results: what is sent of an output, and what ends it."""

from __future__ import annotations

import numpy as np
import pytest

from pegboard.conformance.fake_client import FakeTokenizer
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.pipeline.executor import Done, LocalExecutor
from tests.core.pipeline.harness import EOS, Harness, oracle


def test_streams_every_token_once() -> None:
    harness = Harness()
    harness.submit("a", [5, 6, 7], 6, stream=True, sampling={"ignore_eos": True})
    harness.run()
    assert [len(output.token_ids) for output in harness.outputs["a"]] == [1] * 6
    assert harness.tokens("a") == oracle([5, 6, 7], 6, ignore_eos=True)


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
    harness.scheduler.components.executor = LocalExecutor(
        lambda work: Done(BatchResult(np.array([ord(next(script))], np.int64)))
    )
    harness.submit("a", [3, 4], 9, sampling={"stop": ("bc",), "min_new_tokens": least})
    harness.run()
    assert len(harness.tokens("a")) == length
    assert harness.finish("a") == {"type": "stop", "matched": "bc"}
