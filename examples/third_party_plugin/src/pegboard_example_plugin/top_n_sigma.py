"""Top-n-sigma sampling, by Tang et al., "Top-nσ: Not all logits are you need" (2024).

Of the logits most are noise around a mean, and the few that matter stand out. So a token may be drawn if its logit is
at most `n` standard deviations below the largest. That does not depend on the temperature, unlike top_p or min_p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import torch
from pegboard.core.interfaces import NO_TOKEN, Sampler
from pegboard.toolkit.sampling.custom_params import read_params
from pegboard.toolkit.sampling.filters import Filters
from pegboard.toolkit.sampling.logit_pairs import LAST_RESORT
from pegboard.toolkit.sampling.logprobs import token_logprobs
from pegboard.toolkit.sampling.noise import bits, gumbel, keys

from pegboard_example_plugin.options import TopNSigmaOptions

if TYPE_CHECKING:
    from pegboard.core.interfaces import LogprobOutput, SamplingBatch, SamplingParams

NAME = "top_n_sigma"


class TopNSigmaParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request may say: `"custom_params": {"top_n_sigma": {"n": 1.0}}`."""

    n: Annotated[float, msgspec.Meta(gt=0.0, le=1000.0)]


class TopNSigma(Sampler[TopNSigmaOptions]):
    """First the tokens within `n` sigma, and of these what temperature, top_k, top_p and min_p leave."""

    def wants(self, params: SamplingParams) -> bool:
        return read_params(params, NAME, TopNSigmaParams) is not None

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        peaks, tokens = logits.max(dim=-1)
        fit = peaks.isfinite()
        rows = ((batch.temperatures > 0) & fit).nonzero().flatten()
        if len(rows):
            tokens[rows] = self._draw(logits[rows], batch, rows)
        return tokens.masked_fill_(~fit, NO_TOKEN)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        return token_logprobs(logits, tokens, batch.logprobs)

    def _draw(self, logits: torch.Tensor, batch: SamplingBatch, rows: torch.Tensor) -> torch.Tensor:
        """Tokens int64 [m] of the rows that are not greedy, from their logits [m, vocab]."""
        # Largest first. Sums are float64: in float32 they would depend on how wide the vocabulary is.
        values, ids = logits.to(torch.float64).sort(dim=-1, descending=True, stable=True)
        kept = values >= values[:, :1] - self._n(batch, rows) * spread(values)
        ahead = (values - values[:, :1]) / batch.temperatures[rows, None]
        kept &= Filters.of(batch, rows, values.shape[1]).kept(ahead.exp() * kept)
        # Noise of each token's own: seed, step and token decide it, so a draw is the same in any batch.
        noise = gumbel(bits(keys(batch.seeds[rows], batch.steps[rows]), ids))
        best = (ahead + noise).masked_fill(~kept, -torch.inf).argmax(-1, keepdim=True)
        return ids.gather(1, best).squeeze(1)

    def _n(self, batch: SamplingBatch, rows: torch.Tensor) -> torch.Tensor:
        """float64 [m, 1]. `batch.rows` is empty where no request brings parameters."""
        n = torch.full((len(batch), 1), self.options.n, dtype=torch.float64)
        for index, row in enumerate(batch.rows):
            own = read_params(row.params, NAME, TopNSigmaParams)
            if own is not None:
                n[index] = own.n
        return n.to(batch.temperatures.device)[rows]


def spread(values: torch.Tensor) -> torch.Tensor:
    """Standard deviation float64 [n, 1] of each row's logits, without those of forbidden tokens."""
    counts = values > LAST_RESORT / 2
    number = counts.sum(-1, keepdim=True).clamp(min=1)
    known = values.masked_fill(~counts, 0.0)
    off = (known - known.sum(-1, keepdim=True) / number).masked_fill(~counts, 0.0)
    return (off.square().sum(-1, keepdim=True) / number).sqrt()
