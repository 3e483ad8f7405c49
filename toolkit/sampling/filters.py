"""Filters: which tokens top_k, top_p and min_p keep, for samplers and for speculators that judge.

Masses are unnormalised probabilities exp((logit - peak) / temperature), so the peak's is 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pegboard.core.interfaces.sampling import SamplingBatch


@dataclass(slots=True)
class Filters:
    """Of each row [n] its filters: `top_ks` int64 from 1 (the vocabulary's size where off), `top_ps` float64 and
    `least` float32, the mass below which no token stays, wherever it stands.
    """

    top_ks: torch.Tensor
    top_ps: torch.Tensor
    least: torch.Tensor

    @classmethod
    def of(cls, batch: SamplingBatch, rows: torch.Tensor | slice, vocab_size: int) -> Filters:
        """Take those of some rows of a batch."""
        top_ks = batch.top_ks[rows]
        return cls(
            torch.where(top_ks < 1, vocab_size, top_ks), batch.top_ps[rows].to(torch.float64), batch.min_ps[rows]
        )

    def take(self, rows: torch.Tensor) -> Filters:
        """Return those of some of the rows, by their numbers int64 [m]."""
        return Filters(*(getattr(self, name).index_select(0, rows) for name in self.__slots__))

    def kept(self, mass: torch.Tensor, totals: torch.Tensor | None = None) -> torch.Tensor:
        """Return which tokens all filters keep, bool [n, width]: each works on what the one before it left.

        `mass` float64 [n, width] are those of the largest logits of a row, in descending order; `totals` float64 [n]
        that of its whole vocabulary, for rows without a top_k below `width`; None where `width` is all of it. top_p
        keeps the shortest head whose share reaches it: a token stays if what stands before it has less than that.
        """
        width = mass.shape[1]
        first = torch.arange(width, device=mass.device) < self.top_ks[:, None]
        head = mass.masked_fill(~first, 0.0)
        cumulated = head.cumsum(-1)
        total = cumulated[:, -1]
        if totals is not None:
            total = torch.where(self.top_ks < width, total, totals)
        stays = (cumulated - head < (self.top_ps * total)[:, None]) | (self.top_ps >= 1.0)[:, None]
        return stays & first & (mass >= self.least[:, None])
