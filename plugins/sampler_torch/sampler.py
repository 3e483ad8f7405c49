"""The sampler in plain torch, for any device."""

from __future__ import annotations

import torch

from pegboard.core.interfaces.forward import LogprobOutput
from pegboard.core.interfaces.sampler import Sampler
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.core.toolkit.sampling.logprobs import token_logprobs
from pegboard.plugins.sampler_torch.draw import Rows, draw_from_all, draw_from_top


class TorchSampler(Sampler):
    """Greedy rows take the maximum. Of the others the largest logit with Gumbel noise is drawn, and seed, step and
    token id decide that noise.

    The vocabulary is not sorted where the largest few logits decide, and not at all without top_k and top_p. Filters
    work one after the other, each on what the one before it left, renormalised. Of equal logits at the cut of top_k or
    top_p the smaller ids stay.
    """

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        peaks, tokens = logits.max(dim=-1)
        if not bool(peaks.isfinite().all()):
            _check_rows(logits, peaks)
            logits.clamp_(max=torch.finfo(logits.dtype).max)
            peaks, tokens = logits.max(dim=-1)
        if batch.all_greedy:
            return tokens
        rows = ((batch.temperatures > 0) & (batch.top_ks != 1)).nonzero().squeeze(1)
        if len(rows):
            tokens[rows] = self._draw(logits, peaks, batch, rows)
        return tokens

    def _draw(
        self, logits: torch.Tensor, peaks: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return tokens of the rows that are not greedy."""
        sampled = Rows.of(logits, peaks, batch, rows)
        cut = torch.zeros_like(rows, dtype=torch.bool)
        if batch.need_top_k:
            cut |= sampled.top_ks < sampled.vocab
        if batch.need_top_p:
            cut |= sampled.top_ps < 1.0
        some = cut.nonzero().squeeze(1)
        tokens = torch.zeros_like(rows)
        if len(some):
            tokens[some] = draw_from_top(sampled.take(some))
        if len(some) < len(rows):
            rest = (~cut).nonzero().squeeze(1)
            tokens[rest] = draw_from_all(sampled.take(rest))
        return tokens

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        return token_logprobs(logits, tokens, batch.logprobs)


def _check_rows(logits: torch.Tensor, peaks: torch.Tensor) -> None:
    """Raise ValueError for the first row that cannot be sampled: one with NaN, or without a finite logit."""
    for row in (~peaks.isfinite()).nonzero().flatten().tolist():
        if bool(peaks[row].isnan()):
            raise ValueError(f"row {row} cannot be sampled: its logits hold NaN")
        if not bool(logits[row].isfinite().any()):
            raise ValueError(f"row {row} cannot be sampled: it has no finite logit")
