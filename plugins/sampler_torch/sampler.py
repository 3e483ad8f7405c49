"""The sampler in plain torch, for any device."""

from __future__ import annotations

import torch

from pegboard.core.interfaces.forward import LogprobOutput
from pegboard.core.interfaces.sampler import NO_TOKEN, Sampler
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.plugins.sampler_torch.draw import Rows, draw_from_all, draw_from_top
from pegboard.toolkit.sampling.logprobs import token_logprobs


class TorchSampler(Sampler):
    """Greedy rows take the maximum. Of the others the largest logit with Gumbel noise is drawn, and seed, step and
    token id decide that noise.

    The vocabulary is not sorted where the largest few logits decide, and not at all without top_k and top_p. Filters
    work one after the other, each on what the one before it left, renormalised. Of equal logits at the cut of top_k or
    top_p the smaller ids stay.
    """

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        peaks, tokens = logits.max(dim=-1)
        # On a CPU a look costs less than what it saves; elsewhere it would wait for the device.
        if logits.is_cpu and bool(peaks.isfinite().all()):
            return self._tokens(logits, peaks, tokens, batch)
        fit = peaks.isfinite() | (logits.isfinite().any(-1) & ~peaks.isnan())
        # Infinity is taken for the largest number, and rows of which nothing comes are given something to draw from.
        logits.clamp_(max=torch.finfo(logits.dtype).max).masked_fill_(~fit[:, None], 0.0)
        peaks, tokens = logits.max(dim=-1)
        return self._tokens(logits, peaks, tokens, batch).masked_fill_(~fit, NO_TOKEN)

    def _tokens(
        self, logits: torch.Tensor, peaks: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch
    ) -> torch.Tensor:
        """Return the first argmax, `tokens`, of greedy rows, and what is drawn for all others."""
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
            cut |= sampled.filters.top_ks < sampled.vocab
        if batch.need_top_p:
            cut |= sampled.filters.top_ps < 1.0
        some = cut.nonzero().squeeze(1)
        tokens = torch.zeros_like(rows)
        if len(some):
            tokens[some] = draw_from_top(sampled.take(some))
        if len(some) < len(rows):
            rest = (~cut).nonzero().squeeze(1)
            tokens[rest] = draw_from_all(sampled.take(rest))
        return tokens

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        return token_logprobs(logits, tokens, batch.logprobs, batch.logprob_ids)
