"""One launch draws what the sampler `torch` draws, whatever the tiles are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pegboard.conformance.sampler import make_sampling
from pegboard.toolkit.kernels.launch import Launch, launch, observed
from pegboard.toolkit.sampling import noise
from tests.plugins.sampler_triton.cases import DEVICE, Cases, is_rounding, random_cases, triton_sampler

pytestmark = pytest.mark.filterwarnings("ignore:.*overflow encountered in (subtract|multiply)")


def check_agreement(cases: Cases, **options: int) -> None:
    expected = cases.drawn_by_torch()
    found = cases.drawn(triton_sampler(cases.vocab, **options))
    differ = [row for row, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]]
    assert len(differ) <= 0.001 * len(expected), f"{len(differ)} of {len(expected)} draws differ, rows {differ[:20]}"
    for row in differ:
        pair = found[row], expected[row]
        assert min(pair) >= 0, f"row {row}: {pair}"
        assert is_rounding(cases.logits[row], cases.rows[row], pair), f"{cases.rows[row]}: {pair} is more than rounding"


def test_it_draws_what_the_torch_sampler_draws() -> None:
    check_agreement(random_cases(1500, 60, seed=1))


@pytest.mark.full
@pytest.mark.parametrize(("count", "vocab", "block"), [(10_000, 40, 64), (800, 700, 256), (40, 30_011, 4096)], ids=str)
def test_it_draws_what_the_torch_sampler_draws_in_many_cases(count: int, vocab: int, block: int) -> None:
    check_agreement(random_cases(count, vocab, seed=vocab), block=block)


def test_neither_tiles_nor_strides_matter() -> None:
    cases = random_cases(12, 50, seed=2)
    usual = cases.drawn(triton_sampler(50))
    assert cases.drawn(triton_sampler(50, rows=1)) == usual
    assert cases.drawn(triton_sampler(50, rows=16, block=16)) == usual
    wide = torch.stack([cases.logits, torch.zeros_like(cases.logits)], dim=-1).to(DEVICE)
    batch = cases.sampling(DEVICE)
    for logits in (wide[..., 0], wide.transpose(1, 2).reshape(12, -1)[:, :50]):
        assert triton_sampler(50).sample(logits, batch).tolist() == usual


def test_one_launch_for_all_kinds_of_rows() -> None:
    """And the kernel is the same one for every batch: no parameter of it is compiled in."""
    seen: list[Launch] = []
    batches: list[list[dict[str, Any]]] = [
        [{}] * 3,
        [{"temperature": 1.0}],
        [{"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1}] * 70,
    ]

    def note(one: Launch) -> bool:
        seen.append(one)
        return False

    for rows in batches:
        with observed(note):
            triton_sampler(100, rows=1).sample(torch.zeros(len(rows), 100, device=DEVICE), make_sampling(rows, 100))
    assert [one.grid for one in seen] == [(3,), (1,), (70,)]
    assert all(one.constants == seen[0].constants for one in seen)


@pytest.mark.parametrize("row", [{"top_k": 4}, {"top_p": 0.007}, {"top_k": 100, "top_p": 0.04}], ids=str)
def test_of_equal_logits_at_a_cut_the_smaller_ids_stay(row: dict[str, float]) -> None:
    logits = torch.zeros(100, 500)
    logits[:, 450] = 0.1
    rows = [{"temperature": 1.0, "seed": seed, **row} for seed in range(100)]
    assert set(Cases(logits, rows).drawn(triton_sampler(500))) == {450, 0, 1, 2}


def test_the_noise_is_that_of_all_samplers() -> None:
    """Also the largest of it: a uniform number in float32 would be 1 there, or wrong by far."""
    from tests.plugins.sampler_triton.noise_kernel import noise_kernel  # interpreted, if it is imported here

    count = 2**19
    seeds, steps = torch.tensor([3, -(2**63), 2**62 + 1]), torch.tensor([0, 7, 2**33])
    out = torch.empty(3, count, device=DEVICE)
    launch(noise_kernel, (3,), seeds.to(DEVICE), steps.to(DEVICE), out, COUNT=count, BLOCK=2**14)
    expected = noise.gumbel(noise.bits(noise.keys(seeds, steps), torch.arange(count)))
    assert expected.max() > 13
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-6, atol=2e-6)
