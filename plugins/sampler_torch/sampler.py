"""The sampler in plain torch, for any device."""

from __future__ import annotations

import torch

from pegboard.core.interfaces.forward import LogprobOutput
from pegboard.core.interfaces.sampler import Sampler
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.core.toolkit.logprobs import token_logprobs
from pegboard.plugins.sampler_torch.draw import draw_from_all, draw_from_top, uniforms, weights


class TorchSampler(Sampler):
    """Greedy rows take the maximum; the others are drawn by inverse distribution functions with one uniform each.

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
            tokens[rows] = self._draw(_take(logits, rows), peaks[rows], batch, rows)
        return tokens

    def _draw(
        self, logits: torch.Tensor, peaks: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor
    ) -> torch.Tensor:
        """Tokens of the rows that are not greedy; `logits` and `peaks` are theirs."""
        seeds, steps = batch.seeds[rows], batch.steps[rows]
        temperatures, vocab = batch.temperatures[rows], logits.shape[1]
        top_ks, top_ps, min_ps = batch.top_ks[rows], batch.top_ps[rows], batch.min_ps[rows]
        top_ks = torch.where(top_ks < 1, vocab, top_ks)
        tokens = torch.zeros_like(top_ks)
        cut = torch.zeros_like(top_ks, dtype=torch.bool)
        if batch.need_top_k:
            cut |= top_ks < vocab
        if batch.need_top_p:
            cut |= top_ps < 1.0
        some = cut.nonzero().squeeze(1)
        if len(some):
            tokens[some] = draw_from_top(
                _take(logits, some),
                peaks[some],
                temperatures[some],
                top_ks[some],
                top_ps[some].to(torch.float64),
                min_ps[some],
                seeds[some],
                steps[some],
            )
        if len(some) < len(rows):
            rest = (~cut).nonzero().squeeze(1)
            mass = weights(_take(logits, rest), peaks[rest], temperatures[rest])
            if batch.need_min_p:
                mass.mul_(torch.ge(mass, min_ps[rest, None], out=torch.empty_like(mass)))
            tokens[rest] = draw_from_all(mass, uniforms(seeds[rest], steps[rest]))
        return tokens

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        return token_logprobs(logits, tokens, batch.logprobs)


def _take(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """These rows, ascending and distinct; without a copy when they are all."""
    return table if len(rows) == len(table) else table.index_select(0, rows)


def _check_rows(logits: torch.Tensor, peaks: torch.Tensor) -> None:
    """Raises ValueError for the first row that cannot be sampled: one with NaN, or without a finite logit."""
    for row in (~peaks.isfinite()).nonzero().flatten().tolist():
        if bool(peaks[row].isnan()):
            raise ValueError(f"row {row} cannot be sampled: its logits hold NaN")
        if not bool(logits[row].isfinite().any()):
            raise ValueError(f"row {row} cannot be sampled: it has no finite logit")
