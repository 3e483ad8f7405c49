"""Random rows of every kind, and what both samplers draw for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pegboard.conformance.sampler import make_sampling
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampler import Sampler, SamplerContext
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.plugins.sampler_torch.sampler import TorchSampler
from pegboard.plugins.sampler_triton.options import TritonSamplerOptions
from pegboard.plugins.sampler_triton.sampler import TritonSampler
from pegboard.toolkit.sampling.logit_pairs import LAST_RESORT
from pegboard.toolkit.sampling.noise import bits, gumbel, keys

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR = 1e-4
"""How far apart, relatively, float32 and float64 may be: some ten times as far as they are."""


@dataclass(frozen=True)
class Cases:
    """Logits float32 [n, vocab] and a row of parameters for each."""

    logits: torch.Tensor
    rows: list[dict[str, Any]]

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    def sampling(self, device: torch.device = CPU) -> SamplingBatch:
        return make_sampling(self.rows, self.vocab, device=str(device))

    def drawn_by_torch(self) -> list[int]:
        sampler = TorchSampler(NoOptions(), SamplerContext(self.vocab, CPU))
        return [int(token) for token in sampler.sample(self.logits.clone(), self.sampling())]

    def drawn(self, sampler: Sampler[Any]) -> list[int]:
        tokens = sampler.sample(self.logits.to(DEVICE, copy=True), self.sampling(DEVICE))
        return [int(token) for token in tokens]


def triton_sampler(vocab: int, **options: int) -> TritonSampler:
    return TritonSampler(TritonSamplerOptions.model_validate(options), SamplerContext(vocab, DEVICE))


def random_cases(count: int, vocab: int, seed: int) -> Cases:
    """Logits near and far apart, a third of them with the ties of bfloat16, some ruled out, some rows that hold
    nothing to draw; all filters, and all mixtures of them.
    """
    rng = np.random.default_rng(seed)
    scale = rng.choice([0.0, 0.1, 1.0, 3.0, 8.0], (count, 1), p=[0.1, 0.2, 0.3, 0.3, 0.1])
    logits = torch.from_numpy((rng.normal(size=(count, vocab)) * scale).astype(np.float32))
    logits[::3] = logits[::3].to(torch.bfloat16).to(torch.float32)
    # So near to each other that the cuts go through ties.
    logits[1::5] = logits[1::5].round()
    for row, value in enumerate((-torch.inf, LAST_RESORT, -torch.inf, torch.inf)):
        logits[row::20][torch.from_numpy(rng.random((len(logits[row::20]), vocab)) < 0.2)] = value
    logits[4::50], logits[5::50, vocab // 2], logits[6::50] = -torch.inf, torch.nan, LAST_RESORT
    logits[7::50] = torch.where(torch.arange(vocab) % 2 == 0, torch.inf, -torch.inf)
    return Cases(logits, [_row(rng, vocab) for _ in range(count)])


def _row(rng: np.random.Generator, vocab: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 0.001, 0.3, 0.7, 1.0, 1.0, 1.0, 2.0, 10.0])),
        "seed": int(rng.integers(-(2**63), 2**63)),
        "step": int(rng.integers(0, 2000)),
    }
    if rng.random() < 0.5:
        row["top_k"] = int(min(vocab, rng.choice([1, 2, 5, 20, 50, 400])))
    if rng.random() < 0.5:
        row["top_p"] = float(rng.choice([0.01, 0.3, 0.8, 0.95, 0.999]))
    if rng.random() < 0.4:
        row["min_p"] = float(rng.choice([0.01, 0.1, 0.5, 1.0]))
    return row


def is_rounding(logits: torch.Tensor, row: dict[str, Any], tokens: tuple[int, int]) -> bool:
    """Return whether rounding decides which of two tokens is drawn: their logits with noise are equal but for it, or
    one of them stands at a cut.
    """
    batch = make_sampling([row], len(logits))
    values, ids = logits.double().sort(descending=True, stable=True)
    ahead = (values - values[0]) / row["temperature"]
    mass = ahead.exp()
    head = torch.where(torch.arange(len(values)) < row.get("top_k", len(values)), mass, 0.0)
    share = row.get("top_p", 1.0) * head.sum()
    places = [int((ids == token).nonzero()) for token in tokens]
    noised = (ahead + gumbel(bits(keys(batch.seeds, batch.steps), ids))[0])[places]
    before, own = (head.cumsum(0) - head)[places], mass[places]
    at_a_cut = ((before / share - 1).abs() < NEAR).any() and row.get("top_p", 1.0) < 1
    at_min_p = ((own / max(row.get("min_p", 0.0), 1e-30) - 1).abs() < NEAR).any()
    return bool(at_a_cut or at_min_p or (noised[0] - noised[1]).abs() < NEAR * (1 + ahead[places].abs().max()))
