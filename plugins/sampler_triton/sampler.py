"""The sampler that never waits for its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.sampler import Sampler, SamplerContext
from pegboard.plugins.sampler_triton.options import SMALLEST, TritonSamplerOptions
from pegboard.toolkit.kernels import interpreter, objection
from pegboard.toolkit.kernels.launch import launch
from pegboard.toolkit.kernels.operations import power_of_two
from pegboard.toolkit.sampling.logprobs import token_logprobs

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import LogprobOutput
    from pegboard.core.interfaces.sampling import SamplingBatch

INTERPRETED_TILE = 2**18
"""Logits that a program of the interpreter, which is numpy, looks at at a time."""


class TritonSampler(Sampler[TritonSamplerOptions]):
    """Everything in one launch: greedy rows take the maximum, all others the largest logit with Gumbel noise of those
    that the filters keep.

    Seed, step and token id decide that noise, as in the sampler `torch`, so that both draw the same. Of equal logits at
    the cut of top_k or top_p the smaller ids stay. One kernel serves all parameters: another one for batches without
    filters, say, might round differently.
    """

    def __init__(self, options: TritonSamplerOptions, ctx: SamplerContext) -> None:
        from pegboard.plugins.sampler_triton import kernels

        super().__init__(options, ctx)
        self.kernel = kernels.sample_kernel

    @classmethod
    def supports(cls, options: TritonSamplerOptions, ctx: SamplerContext) -> str | None:
        return objection(ctx.device)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        count, vocab = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        block = min(self.options.block, max(power_of_two(vocab), SMALLEST))
        rows = self.options.rows or self._usual_rows(count, block)
        tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        launch(
            self.kernel,
            (-(-count // rows),),
            logits,
            tokens,
            batch.temperatures,
            batch.top_ks,
            batch.top_ps,
            batch.min_ps,
            batch.seeds,
            batch.steps,
            count,
            vocab,
            # A single row may have any stride, and the compiler looks at strides: it is to see that of many rows.
            logits.stride(0) if count > 1 else vocab,
            ROWS=rows,
            BLOCK=block,
            num_warps=max(1, min(16, block * rows // 256)),
            # All that 512 threads may have: by itself ptxas sometimes takes half of it, and spills.
            maxnreg=128,
            enable_fp_fusion=True,
        )
        return tokens

    def _usual_rows(self, count: int, block: int) -> int:
        """Return how many rows a program takes. The interpreter runs one program after the other."""
        return min(power_of_two(count), max(INTERPRETED_TILE // block, 1)) if interpreter.interpreting() else 1

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        return token_logprobs(logits, tokens, batch.logprobs, batch.logprob_ids)
