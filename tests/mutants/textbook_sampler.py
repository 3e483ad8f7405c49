"""A sampler that sorts everything and never waits for its device; and ways to wait after all."""

from __future__ import annotations

from dataclasses import replace

import torch

from pegboard.core.interfaces.forward import LogprobOutput
from pegboard.core.interfaces.sampler import NO_TOKEN, Sampler
from pegboard.core.interfaces.sampling import SamplingBatch
from pegboard.toolkit.sampling.logprobs import token_logprobs
from pegboard.toolkit.sampling.noise import bits, gumbel, keys


class Sorting(Sampler):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        fit = logits.isfinite().any(-1) & ~logits.isnan().any(-1)
        values, ids = logits.clamp(max=torch.finfo(logits.dtype).max).sort(dim=-1, descending=True, stable=True)
        sampled = (batch.temperatures > 0) & fit
        ahead = (values.double() - values[:, :1]) / torch.where(sampled, batch.temperatures, 1.0)[:, None]
        mass = ahead.exp()
        kept = torch.arange(logits.shape[1], device=logits.device) < batch.top_ks[:, None]
        head = torch.where(kept, mass, 0.0)
        share = batch.top_ps[:, None] * head.sum(-1, keepdim=True)
        kept &= (head.cumsum(-1) - head < share) | (batch.top_ps >= 1)[:, None]
        kept &= mass >= batch.min_ps[:, None]
        noise = gumbel(bits(keys(batch.seeds, batch.steps), ids))
        best = torch.where(kept, ahead + noise, -torch.inf).argmax(-1, keepdim=True)
        tokens = torch.where(sampled, ids.gather(1, best).squeeze(1), ids[:, 0])
        return torch.where(fit, tokens, NO_TOKEN)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        return token_logprobs(logits, tokens, batch.logprobs, batch.logprob_ids)


class LooksWhetherAllIsWell(Sorting):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if not bool(logits.isfinite().all()):
            logits = logits.clone()
        return super().sample(logits, batch)


class PicksTheSampledRows(Sorting):
    """Their number is known only when they are."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        tokens = super().sample(logits, batch)
        rows = (batch.temperatures > 0).nonzero().squeeze(1)
        tokens[rows] = tokens[rows]
        return tokens


class SamplesOnTheHost(Sorting):
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return super().sample(logits.cpu(), batch).to(logits.device)


class BringsTokenIdsItself(Sorting):
    """Although they are on the device already."""

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        return super().logprobs(logits, tokens, replace(batch, logprob_ids=None))
