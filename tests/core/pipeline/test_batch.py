"""What batches say to a worker, against the requests that they were made of."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest

from pegboard.core.interfaces.batch import ModelWorkerBatch
from tests.core.pipeline.harness import VOCAB, Harness, oracle, prompts

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.5, "top_p": 0.75, "ignore_eos": True},
    {"temperature": 1.0, "top_k": 4, "min_p": 0.125, "seed": 3, "ignore_eos": True},
    {"top_k": 10**6, "ignore_eos": True},
)


def arrays(work: ModelWorkerBatch) -> dict[str, Any]:
    """Copies of all that a worker may read."""
    found = {name: copy.deepcopy(getattr(work, name)) for name in ("input_ids", "positions", "rows", "seq_lens")}
    found |= {name: copy.deepcopy(getattr(work, name)) for name in ("extend_lens", "prefix_lens", "out_cache_loc")}
    if work.sampling is not None:
        found |= {"numbers": work.sampling.numbers.copy(), "steps": work.sampling.steps.copy()}
    return found


def served(loop: str, **more: Any) -> tuple[Harness, list[tuple[ModelWorkerBatch, dict[str, Any]]]]:
    """Serve requests of many kinds; return each batch with copies of its arrays from when it was launched."""
    harness = Harness(loop=loop, chunk=16, page_size=4, tokens=512, max_running_requests=6, **more)
    launched: list[tuple[ModelWorkerBatch, dict[str, Any]]] = []
    harness.model.fail_on = lambda work: bool(launched.append((work, arrays(work))))  # type: ignore[func-returns-value]
    for number, (prompt, sampling) in enumerate(zip(prompts(12, longest=40), itertools.cycle(SAMPLING))):
        harness.submit(f"r{number}", prompt, 4 + number, stream=bool(number % 2), sampling=sampling)
        harness.step()
    harness.run()
    return harness, launched


@pytest.mark.parametrize("loop", ["normal", "overlap"])
@pytest.mark.parametrize("mixed", [False, True])
def test_lengths_and_places_fit_together(loop: str, mixed: bool) -> None:
    _, launched = served(loop, mixed_chunk=mixed)
    assert len(launched) > 20
    for work, _ in launched:
        assert (work.prefix_lens + work.extend_lens == work.seq_lens).all()
        spans = zip(work.prefix_lens, work.seq_lens, strict=True)
        assert work.positions.tolist() == [position for start, stop in spans for position in range(start, stop)]
        assert len(set(work.out_cache_loc.tolist())) == len(work.out_cache_loc), "each new token has a slot of its own"
        assert work.out_cache_loc.min() >= 4, "page 0 is for padding"
        if work.sampling is not None:
            assert len(work.sampling.numbers) == len(work.sampling.steps) == len(work.sampled_rows)
            if work.logits_indices is not None:
                assert set(work.logits_indices.tolist()) <= set((np.cumsum(work.extend_lens) - 1).tolist())


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_what_was_handed_out_never_changes(loop: str) -> None:
    """A worker may read it while the next step is built."""
    _, launched = served(loop)
    for work, before in launched:
        for name, value in arrays(work).items():
            assert np.array_equal(value, before[name]), name


def test_sampling_is_the_requests_own_and_its_version_names_it() -> None:
    harness, launched = served("normal")
    rows = {tuple(row) for _, found in launched for row in found.get("numbers", np.empty(0)).tolist()}
    expected = {(0.5, 0.75, 0.0, VOCAB), (1.0, 1.0, 0.125, 4), (0.0, 1.0, 0.0, VOCAB)}
    assert {row[:4] for row in rows} == expected
    by_version: dict[int, list[Any]] = {}
    for work, found in launched:
        if work.sampling is not None:
            numbers = found["numbers"].tolist()
            assert by_version.setdefault(work.sampling.version, numbers) == numbers
    assert len(by_version) < sum(work.sampling is not None for work, _ in launched), "decodes of the same share it"
    for number, prompt in enumerate(prompts(12, longest=40)):
        assert harness.tokens(f"r{number}") == oracle(prompt, 4 + number, ignore_eos=True)
