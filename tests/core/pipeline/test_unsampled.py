"""A request that no token can be drawn for ends alone, with what it has so far; its neighbours do not notice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.keys import PrefixKey
from pegboard.core.interfaces.sampler import NO_TOKEN
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.toolkit.sampling import tree
from tests.core.pipeline.harness import FakeModel, Harness, Seer, next_token, oracle

BAD = [99, 98, 97]
SHORT = 6
"""Tokens of the bad request's context from which nothing can be drawn any more."""


class Spoilt(FakeModel):
    """Finds nothing to draw behind contexts that begin with BAD and are long enough."""

    def answer(self, work: ModelWorkerBatch) -> BatchResult:
        result = super().answer(work)
        if work.trees is None and work.sampling is not None:
            for place, row in enumerate(work.sampled_rows.tolist()):
                length = int(work.seq_lens[work.rows.tolist().index(row)])
                if self.is_bad(self.slots[self.table[row, :length]]):
                    result.tokens[place] = NO_TOKEN
                    self.last[row] = 0  # what a worker keeps is a token
                    result.unsampled = True
        return result

    def is_bad(self, context: np.ndarray[Any, Any]) -> bool:
        return context[: len(BAD)].tolist() == BAD and len(context) >= SHORT

    def verify(self, work: ModelWorkerBatch, trees: TokenTrees) -> BatchResult:
        result = super().verify(work, trees)
        assert result.accepted is not None
        assert work.logits_indices is not None
        starts = tree.starts(trees.counts)
        ends = np.cumsum(work.extend_lens)
        kept_counts, kept_nodes, kept_tokens = [], [], []
        gained = np.cumsum(result.accepted.counts) - result.accepted.counts
        for index, (start, count) in enumerate(zip(starts.tolist(), trees.counts.tolist(), strict=True)):
            number = int(np.searchsorted(ends, work.logits_indices[start], "right"))
            row, before = int(work.rows[number]), int(work.seq_lens[number]) - count
            own = slice(int(gained[index]), int(gained[index]) + int(result.accepted.counts[index]))
            nodes, tokens = result.accepted.nodes[own].tolist(), result.accepted.tokens[own].tolist()
            for place in range(len(tokens)):
                if self.is_bad(self.slots[self.table[row, : before + 1 + place]]):
                    nodes, tokens = nodes[: place + 1], [*tokens[:place], NO_TOKEN]
                    result.unsampled = True
                    break
            kept_counts.append(len(tokens))
            kept_nodes += nodes
            kept_tokens += tokens
        result.accepted.counts[:] = kept_counts
        result.accepted = type(result.accepted)(
            np.array(kept_counts, np.int64), np.array(kept_nodes, np.int64), np.array(kept_tokens, np.int64)
        )
        result.tokens = result.accepted.tokens
        return result


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["normal", "overlap", "drafts"])
def test_it_ends_alone(way: str, stream: bool) -> None:
    speculation: dict[str, Any] = {"speculator": Seer(0.9)} if way == "drafts" else {}
    harness = Harness(loop="overlap" if way == "overlap" else "normal", model=Spoilt, **speculation)
    good = {"a": [3, 4, 5, 6], "b": [10, 11]}
    harness.submit("a", good["a"], n=20, stream=stream, sampling={"ignore_eos": True})
    harness.submit("bad", BAD, n=20, stream=stream, sampling={"ignore_eos": True})
    harness.submit("b", good["b"], n=20, stream=stream, sampling={"ignore_eos": True})
    harness.run()
    for rid, prompt in good.items():
        assert harness.tokens(rid) == oracle(prompt, 20, ignore_eos=True)
        assert harness.finish(rid)["type"] == "length"
    reason = harness.finish("bad")
    assert (reason["type"], reason["status"], reason["code"]) == ("abort", 500, "not_sampleable")
    # Tokens come one by one up to the context behind which nothing can be drawn.
    assert harness.tokens("bad") == oracle(BAD, SHORT - len(BAD), ignore_eos=True)
    counters = harness.scheduler.counters
    assert (counters.failed_batches, counters.book_errors) == (0, 0)
    assert next_token(np.array(BAD, np.int64)) == harness.tokens("bad")[0]


def test_one_whose_first_token_is_missing() -> None:
    """A prompt that is long enough: it gets nothing, and its KV is not kept for others."""
    harness = Harness(model=Spoilt)
    prompt = [*BAD, 1, 2, 3, 4]
    harness.submit("bad", prompt)
    harness.run()
    assert harness.finish("bad")["code"] == "not_sampleable"
    assert harness.tokens("bad") == []
    key = PrefixKey(np.array(prompt, np.int64), "")
    assert harness.memory.cache.matched_length(key) == 0
