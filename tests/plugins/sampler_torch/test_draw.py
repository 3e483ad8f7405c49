"""The sampler's own machinery: noise, and how few candidates a filter looks at."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pegboard.conformance.sampler import P_VALUE, chi_square, exact_probabilities, make_sampling
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampler import SamplerContext
from pegboard.plugins.sampler_torch import draw
from pegboard.plugins.sampler_torch.sampler import TorchSampler
from pegboard.toolkit.sampling import noise
from tests.plugins.sampler_torch import noise_reference

SEEDS = (0, 1, -1, 2**63 - 1, -(2**63), 987654321)


def pairs(seeds: int, ids: int, seed_step: int = 0, step_step: int = 0, id_step: int = 0) -> tuple[torch.Tensor, ...]:
    """Bits of many seeds and ids, and those of the seeds, steps or ids that stand so far behind."""
    numbers, steps, tokens = torch.arange(seeds), torch.arange(seeds) % 13, torch.arange(ids)
    return (
        noise.bits(noise.keys(numbers, steps), tokens),
        noise.bits(noise.keys(numbers + seed_step, steps + step_step), tokens + id_step),
    )


class TestNoise:
    def test_the_bits_are_those_of_the_reference(self) -> None:
        ids = np.array([0, 1, 2, 63, 64, 1000, 151_935, 262_143, 2**31 - 1])
        for seed in SEEDS:
            for step in (0, 1, 4095):
                found = noise.bits(noise.keys(torch.tensor([seed]), torch.tensor([step])), torch.from_numpy(ids))
                assert found.dtype == torch.int32
                assert found[0].tolist() == noise_reference.bits(seed, step, ids).tolist()
                torch.testing.assert_close(
                    noise.gumbel(found)[0].numpy(), noise_reference.noise(seed, step, ids), rtol=1e-14, atol=0
                )

    def test_the_ends_are_finite(self) -> None:
        ends = noise.gumbel(torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32))
        most = 33 * math.log(2)  # -log(2^-33)
        torch.testing.assert_close(ends.tolist(), [-math.log(most), most], rtol=1e-9, atol=0)

    def test_no_two_tokens_of_a_row_have_the_same(self) -> None:
        for row in noise.bits(noise.keys(torch.arange(3), torch.zeros(3, dtype=torch.int64)), torch.arange(262_144)):
            assert len(row.unique()) == 262_144

    def test_it_is_gumbel_noise(self) -> None:
        """64 equal parts of the distribution equally often; and of the tail, to the last parts in 2^20."""
        found = noise.gumbel(pairs(1000, 4000)[0]).flatten()
        parts = (-(-found).exp()).exp()
        counts = torch.bincount((parts * 64).long(), minlength=64)
        assert chi_square(counts.numpy(), np.full(64, 1 / 64)) > P_VALUE
        for tail in (2.0**-10, 2.0**-14, 2.0**-18, 2.0**-20):
            expected = tail * len(parts)
            for count in (int((parts < tail).sum()), int((parts > 1 - tail).sum())):
                assert abs(count - expected) < 5 * expected**0.5 + 1, f"{count} in a tail of {tail}, not {expected}"

    @pytest.mark.parametrize(
        "apart",
        [(0, 0, 1), (0, 0, 2), (0, 0, 3), (0, 0, 64), (0, 0, 4096), (0, 0, 65536), (0, 1, 0), (1, 0, 0), (1, 0, 1)],
        ids=str,
    )
    def test_neighbours_are_independent(self, apart: tuple[int, int, int]) -> None:
        """Token ids, steps and seeds: all pairs of 32 parts equally often, and of the tails that decide draws."""
        first, second = pairs(1000, 2000, *apart)
        counts = torch.bincount((((first >> 27) + 16) * 32 + (second >> 27) + 16).flatten(), minlength=1024)
        assert chi_square(counts.numpy(), np.full(1024, 2.0**-10)) > P_VALUE
        both = int(((first >= 2**31 - 2**24) & (second >= 2**31 - 2**24)).sum())
        expected = first.numel() * 2.0**-16
        assert abs(both - expected) < 5 * expected**0.5


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, width) of each look at the largest logits."""
    seen: list[tuple[int, int]] = []
    largest = draw._largest

    def spy(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((len(logits), width))
        return largest(logits, width)

    monkeypatch.setattr(draw, "_largest", spy)
    return seen


def sample(logits: torch.Tensor, rows: list[dict[str, float]]) -> list[int]:
    vocab = logits.shape[1]
    sampler = TorchSampler(NoOptions(), SamplerContext(vocab, torch.device("cpu")))
    return [int(token) for token in sampler.sample(logits.clone(), make_sampling(rows, vocab))]


def test_nothing_is_sorted_without_top_k_and_top_p(widths: list[tuple[int, int]]) -> None:
    sample(torch.randn(3, 20000), [{}, {"temperature": 1.0}, {"temperature": 1.0, "min_p": 0.1}])
    assert widths == []


def test_each_row_looks_at_as_few_as_it_needs(widths: list[tuple[int, int]]) -> None:
    flat, steep = torch.randn(1, 20000) * 0.1, torch.randn(1, 20000) * 8
    logits = torch.cat([steep, steep, steep, flat, flat])
    rows = [{"top_k": 20}, {"top_k": 300}, {"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.9}]
    sample(logits, [{"temperature": 1.0, **row} for row in rows])  # type: ignore[dict-item]
    assert widths == [(2, 64), (2, 256), (1, 1024)]


def test_a_cut_through_ties_widens_the_look_for_that_row_alone(widths: list[tuple[int, int]]) -> None:
    logits = torch.zeros(2, 20000)
    logits[0] = torch.randn(20000)
    sample(logits, [{"temperature": 1.0, "top_k": 5}] * 2)
    assert [rows for rows, _ in widths] == [2, 1, 1, 1, 1]
    assert widths[-1] == (1, 20000)


def test_of_equal_logits_at_a_cut_the_smaller_ids_stay() -> None:
    logits = torch.zeros(1, 9000)
    logits[0, 8000] = 1.0
    rows = [{"temperature": 1.0, "top_k": 4, "seed": seed} for seed in range(200)]
    assert set(sample(logits.expand(200, -1), rows)) == {8000, 0, 1, 2}


def test_infinite_logits_take_it_all() -> None:
    logits = torch.zeros(3, 100)
    logits[:, 40] = torch.inf
    assert sample(logits, [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}]) == [40, 40, 40]


def test_a_wide_nucleus_is_not_sorted_unless_it_is_missed_again_and_again(widths: list[tuple[int, int]]) -> None:
    logits = torch.randn(1, 20000, generator=torch.Generator().manual_seed(1)) * 0.1
    rows = [{"temperature": 1.0, "top_p": 0.5, "seed": seed} for seed in range(200)]
    sample(logits.expand(200, -1), rows)
    sorted_rows = sum(count for count, width in widths if width == 20000)
    assert sorted_rows < 10, "one row in 256 misses it eight times"


def test_a_wide_nucleus_that_is_missed_keeps_its_place_before_a_long_head(widths: list[tuple[int, int]]) -> None:
    """Both go on together from there, and are all the rows there are."""
    logits = torch.zeros(2, 20000)
    logits[1] = torch.randn(20000, generator=torch.Generator().manual_seed(1))
    for seed in range(60):
        both = {"temperature": 1.0, "seed": seed}
        rows = [{**both, "top_p": 0.02}, {**both, "top_k": 300}]
        alone = [sample(logits[[index]], [row])[0] for index, row in enumerate(rows)]
        widths.clear()
        assert sample(logits, rows) == alone
        if (2, 1024) in widths:
            break
    else:
        pytest.fail("no seed misses its nucleus eight times")


@pytest.mark.parametrize(("top_p", "min_p"), [(0.3, 0.0), (0.9, 0.85)])
def test_wide_nuclei_are_drawn_from_as_if_they_were_sorted(top_p: float, min_p: float) -> None:
    """Both ways, and their mixture where the trials end."""
    vocab = 6000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 0.05
    row = {"temperature": 1.0, "top_p": top_p, "min_p": min_p}
    exact = exact_probabilities(logits.numpy(), row)
    groups = torch.from_numpy(exact).argsort(descending=True) % 20
    tokens = []
    for start in range(0, 2000, 500):
        tokens += sample(logits.expand(500, -1), [{**row, "seed": seed} for seed in range(start, start + 500)])
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[exact == 0].any()
    by_group = [np.bincount(groups.numpy(), weights=values, minlength=20) for values in (counts, exact)]
    assert chi_square(by_group[0], by_group[1]) > P_VALUE  # type: ignore[arg-type]


def test_a_draw_is_the_best_of_what_is_kept() -> None:
    """What is not drawn may go: with any of the other tokens impossible, or unlikelier, the same token is drawn."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(200, 3000, generator=generator) * 2
    rows = [{"temperature": 1.3, "seed": seed} for seed in range(200)]
    tokens = torch.tensor(sample(logits, rows))
    less = logits - torch.rand(logits.shape, generator=generator).log().neg()
    less[torch.rand(logits.shape, generator=generator) < 0.5] = -torch.inf
    less.scatter_(1, tokens[:, None], logits.gather(1, tokens[:, None]))
    assert sample(less, rows) == tokens.tolist()


def test_large_batches_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 5000, generator=torch.Generator().manual_seed(1)) * 0.1
    rows = [{"temperature": 1.0, "seed": seed, **({"top_p": 0.7} if seed % 2 else {})} for seed in range(7)]
    whole = sample(logits, rows)
    monkeypatch.setattr(draw, "_CPU_TILE", 10_000)
    assert sample(logits, rows) == whole


def test_of_equal_logits_at_the_cut_of_a_wide_nucleus_the_smaller_ids_stay() -> None:
    tokens = sample(torch.zeros(300, 9000), [{"temperature": 1.0, "top_p": 0.6, "seed": seed} for seed in range(300)])
    assert max(tokens) < 5400
    assert max(tokens) > 5000
