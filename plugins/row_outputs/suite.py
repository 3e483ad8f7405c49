"""The conformance suite of Pooler."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pegboard.conformance.properties import properties
from pegboard.conformance.suite import ContractSuite
from pegboard.plugins.row_outputs.api import Pooler, PoolerContext, PoolSpan

HIDDEN = 12
TOLERANCE = 1e-5
"""Of a vector whose parts are combined in another order. A float32 mean of 40 states of about 1 is off by up to
2.5 * 2^-24, if they are added one after the other; what has larger numbers, such as a norm, by as much of these.
"""


def spans_of(length: int, cuts: Sequence[int], start: int = 0) -> list[PoolSpan]:
    """Return a prompt of `length` tokens from `start` on, cut into steps at `cuts`."""
    edges = sorted({start, length, *(cut for cut in cuts if start < cut < length)})
    return [PoolSpan(low, high - low, length) for low, high in itertools.pairwise(edges)]


class PoolerContract(ContractSuite):
    """A prompt's vector does not depend on how the prompt was computed."""

    contract = "pooler"

    files: ClassVar[Mapping[str, Any]] = {}
    """Files of the model's directory that the pooler reads, by relative path, as JSON values."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        """Return a model directory with `files` in it."""
        for name, value in self.files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(value), "utf-8")
        return tmp_path

    @pytest.fixture
    def pooler(self, directory: Path) -> Pooler:
        made: Pooler = self.build(PoolerContext(directory, HIDDEN))
        return made

    def states(self, length: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(seed))

    def pool(self, pooler: Pooler, states: torch.Tensor, spans: Sequence[PoolSpan]) -> NDArray[np.float32]:
        """As the pipeline does it, one step per span."""
        partials = []
        for span in spans:
            rows = pooler.rows(span)
            if len(rows):
                partials.append(pooler.reduce(states[span.start :][torch.tensor(rows)], [span])[0].numpy())
        return pooler.combine(partials, len(states))

    @pytest.mark.parametrize("length", [1, 2, 17])
    def test_one_vector_in_float32(self, pooler: Pooler, length: int) -> None:
        vector = self.pool(pooler, self.states(length), spans_of(length, ()))
        assert vector.shape == (HIDDEN,)
        assert vector.dtype == np.float32
        assert np.isfinite(vector).all()

    def test_chunks_do_not_matter(self, pooler: Pooler) -> None:
        @properties(40)
        @given(st.integers(1, 40), st.lists(st.integers(1, 39), max_size=6))
        def check(length: int, cuts: list[int]) -> None:
            states = self.states(length)
            whole = self.pool(pooler, states, spans_of(length, ()))
            np.testing.assert_allclose(
                self.pool(pooler, states, spans_of(length, cuts)), whole, rtol=TOLERANCE, atol=TOLERANCE
            )

        check()

    def test_cached_before_the_first_position_does_not_matter(self, pooler: Pooler) -> None:
        """Prompts whose beginning is cached are computed from some position up to `first` on."""
        for length in (1, 2, 9, 33):
            first = pooler.first(length)
            assert 0 <= first < length, f"a prompt of {length} tokens has no position {first}"
            states = self.states(length)
            whole = self.pool(pooler, states, spans_of(length, ()))
            for start in {first, first // 2}:
                found = self.pool(pooler, states, spans_of(length, (start + 1,), start))
                np.testing.assert_allclose(found, whole, rtol=TOLERANCE, atol=TOLERANCE)

    def test_rows_lie_in_the_span(self, pooler: Pooler) -> None:
        for length in (1, 8, 30):
            for span in spans_of(length, (3, 4, 11)):
                rows = pooler.rows(span)
                assert all(0 <= row < span.count for row in rows)
                if span.start + span.count <= pooler.first(length):
                    assert len(rows) == 0, "it reads what it said it does not need"

    def test_other_prompts_of_the_batch_do_not_matter(self, pooler: Pooler) -> None:
        """`reduce` gets the rows of several spans, one after the other, and answers one vector each, in order."""
        prompts = [(self.states(n, n), spans_of(n, (5,))[-1]) for n in (9, 3, 14)]
        packed, spans, alone = [], [], []
        for states, span in prompts:
            rows = torch.tensor(pooler.rows(span), dtype=torch.int64)
            if len(rows):
                packed.append(states[span.start :][rows])
                spans.append(span)
                alone.append(pooler.reduce(packed[-1], [span])[0])
        if not spans:
            pytest.skip("it reads nothing of these spans")
        together = pooler.reduce(torch.cat(packed), spans)
        assert together.shape == (len(spans), HIDDEN)
        torch.testing.assert_close(together, torch.stack(alone), rtol=TOLERANCE, atol=TOLERANCE)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_partial_results_are_float32(self, pooler: Pooler, dtype: torch.dtype) -> None:
        """Sums of many short numbers lose too much."""
        span = PoolSpan(0, 6, 6)
        states = self.states(6)[torch.tensor(pooler.rows(span))].to(dtype)
        assert pooler.reduce(states, [span]).dtype == torch.float32

    def test_it_reads_something(self, pooler: Pooler) -> None:
        """Another prompt has another vector."""
        one, other = (self.pool(pooler, self.states(8, seed), spans_of(8, ())) for seed in (1, 2))
        assert not np.allclose(one, other)
