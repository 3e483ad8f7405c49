"""The sampler's own machinery: uniforms, two-level draws, and how few candidates a filter looks at."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampler import SamplerContext
from pegboard.core.testing.sampler import P_VALUE, chi_square, exact_probabilities, make_sampling
from pegboard.plugins.sampler_torch import draw
from pegboard.plugins.sampler_torch.sampler import TorchSampler

MASK = 2**64 - 1


def reference_uniform(seed: int, step: int) -> float:
    """The same in Python's integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    state = mix((seed + gamma) & MASK)
    return (mix((state + (step + 1) * gamma) & MASK) >> 11) / 2**53


def test_uniforms_are_splitmix64() -> None:
    pairs = [(s, t) for s in (0, 1, -1, 2**63 - 1, -(2**63), 987654321) for t in (0, 1, 2, 4095)]
    seeds, steps = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert draw.uniforms(seeds, steps).tolist() == [reference_uniform(s, t) for s, t in pairs]


def test_uniforms_cover_the_unit_interval() -> None:
    values = draw.uniforms(torch.arange(100_000), torch.zeros(100_000, dtype=torch.int64))
    assert 0.0 <= values.min() < 1e-4
    assert 1 - 1e-4 < values.max() < 1.0
    assert abs(values.mean() - 0.5) < 0.005
    assert abs(values.var() - 1 / 12) < 0.002


@pytest.mark.parametrize("vocab", [1, 5, 255, 256, 257, 512, 1000])
def test_every_column_with_mass_can_be_drawn(vocab: int) -> None:
    """Each quantile gives the column that a plain cumulated sum gives, up to rounding at its border."""
    mass = torch.rand(1, vocab, generator=torch.Generator().manual_seed(1))
    mass[0, vocab // 2 : vocab // 2 + vocab // 3] = 0.0
    cumulated = mass[0].to(torch.float64).cumsum(0)
    middles = (cumulated - mass[0] / 2) / cumulated[-1]
    columns = mass[0].nonzero().flatten()
    drawn = draw.draw_from_all(mass.expand(len(columns), -1), middles[columns])
    assert drawn.tolist() == columns.tolist()


@pytest.mark.parametrize("vocab", [3, 256, 700])
@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_the_ends_of_the_unit_interval_hit_mass(vocab: int, uniform: float) -> None:
    mass = torch.zeros(1, vocab)
    mass[0, vocab // 2] = 0.1
    mass[0, vocab // 2 - 1] = 0.3
    drawn = draw.draw_from_all(mass, torch.tensor([uniform], dtype=torch.float64))
    assert drawn.tolist() == [vocab // 2 - 1 if uniform == 0.0 else vocab // 2]


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
    sample(logits, [{"temperature": 1.0, **row} for row in rows])
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
    assert chi_square(by_group[0], by_group[1]) > P_VALUE


def test_of_equal_logits_at_the_cut_of_a_wide_nucleus_the_smaller_ids_stay() -> None:
    tokens = sample(torch.zeros(300, 9000), [{"temperature": 1.0, "top_p": 0.6, "seed": seed} for seed in range(300)])
    assert max(tokens) < 5400
    assert max(tokens) > 5000
