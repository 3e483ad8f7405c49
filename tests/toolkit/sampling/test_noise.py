"""Uniform numbers from seeds and steps."""

from __future__ import annotations

import torch

from pegboard.toolkit.sampling import noise


def test_uniforms_are_uniform_and_a_row_knows_of_no_other() -> None:
    seeds, steps = torch.arange(-2000, 2000).repeat_interleave(10), torch.arange(10).repeat(4000)
    found = noise.uniforms(seeds, steps)
    assert found.dtype is torch.float64
    assert found.unique().numel() == found.numel()
    # Kolmogorov-Smirnov against the uniform distribution, at the level 1e-6.
    ranks = torch.arange(1, found.numel() + 1, dtype=torch.float64) / found.numel()
    assert float((found.sort().values - ranks).abs().max()) < 2.7 / found.numel() ** 0.5
    lag = torch.corrcoef(found.view(4000, 10)[:, :2].T)[0, 1]
    assert abs(float(lag)) < 0.08, "one step says nothing of the next"
    some = torch.tensor([7, 39_999, 12_345])
    assert noise.uniforms(seeds[some], steps[some]).equal(found[some])


def test_uniforms_never_reach_the_ends() -> None:
    def of(key: int) -> float:
        return float(noise._unit(torch.tensor([key])))

    assert 0.0 < of(0) < of(-1) < 1.0
