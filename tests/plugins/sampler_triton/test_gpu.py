"""On a GPU, at the sizes of a real model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pegboard.conformance.sampler import make_sampling
from pegboard.core.interfaces.sampling import LogprobRequest
from tests.plugins.sampler_triton.cases import Cases, is_rounding, random_cases, triton_sampler

pytestmark = pytest.mark.gpu


@pytest.fixture
def sync_debug_mode() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("count", "vocab"), [(3000, 1000), (200, 50_257), (100, 151_936)], ids=str)
def test_it_draws_what_the_torch_sampler_draws(count: int, vocab: int) -> None:
    cases = random_cases(count, vocab, seed=vocab)
    pairs = list(zip(cases.drawn(triton_sampler(vocab)), cases.drawn_by_torch(), strict=True))
    differ = [row for row, pair in enumerate(pairs) if pair[0] != pair[1]]
    assert len(differ) <= max(1, 0.001 * count)
    for row in differ:
        assert min(pairs[row]) >= 0
        assert is_rounding(cases.logits[row], cases.rows[row], pairs[row])


def test_a_draw_does_not_depend_on_the_batch() -> None:
    cases = random_cases(64, 128_256, seed=5)
    sampler = triton_sampler(128_256)
    together = cases.drawn(sampler)
    for size in (1, 3, 16):
        parts = [Cases(cases.logits[at : at + size], cases.rows[at : at + size]) for at in range(0, 64, size)]
        assert [token for part in parts for token in part.drawn(sampler)] == together


@pytest.mark.usefixtures("sync_debug_mode")
def test_it_never_waits() -> None:
    vocab, device = 128_256, torch.device("cuda")
    logits = torch.randn(8, vocab, device=device)
    rows = [{"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": row} for row in range(8)]
    batch = make_sampling(rows, vocab, logprobs=[LogprobRequest(3, (4, 5))] * 8, device="cuda")
    batch.logprob_ids = torch.tensor([4, 5] * 8, device=device)
    sampler = triton_sampler(vocab)
    sampler.sample(logits.clone(), batch)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(5):
        sampler.logprobs(logits, sampler.sample(logits.clone(), batch), batch)
