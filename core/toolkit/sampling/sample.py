"""For runners: from logits to tokens, in the order that everybody expects."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from pegboard.core.interfaces.sampler import NoFiniteLogit
from pegboard.core.toolkit.sampling.token_mask import apply_token_mask

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.forward import ForwardOutput
    from pegboard.core.interfaces.logits_processor import LogitsProcessor
    from pegboard.core.interfaces.model_runner import ModelRunnerContext
    from pegboard.core.interfaces.sampling import SamplingBatch


def sample(
    logits: torch.Tensor,
    sampling: SamplingBatch,
    ctx: ModelRunnerContext,
    output: ForwardOutput,
    *,
    return_logits: bool = False,
) -> None:
    """Let processors, grammars' masks and the sampler at `logits` float32 [n, vocab], which are theirs to change, and
    put what is wanted into `output`: tokens, logprobs, the processed logits. Raises NoFiniteLogit for rows that no
    sampler can take.
    """
    if sampling.rows:
        for processor in ctx.processors:
            state = processor.prepare(sampling.rows)
            if state is not None:
                processor.apply(logits, state)
    apply_token_mask(logits, sampling)
    # The sampler may overwrite what it reads, so what reads the logits after it needs a copy.
    kept = logits.clone() if sampling.want_logprobs or return_logits else logits
    try:
        output.next_token_ids = ctx.sampler.sample(logits, sampling)
    except ValueError as error:
        bad = _unfit(logits)
        if not bool(bad.any()):
            raise
        # Not the sampler's fault, so neither its traceback.
        raise NoFiniteLogit(str(error), _left_nothing(logits, bad, sampling, ctx)) from None
    output.sampled_by = ctx.sampler
    if sampling.want_logprobs:
        output.logprobs = ctx.sampler.logprobs(kept, output.next_token_ids, sampling)
    if return_logits:
        output.logits = kept


def _unfit(logits: torch.Tensor) -> torch.Tensor:
    """Return which rows [n] no sampler can take: they hold NaN, or nothing finite."""
    return logits.isnan().any(-1) | ~logits.isfinite().any(-1)


def _left_nothing(
    logits: torch.Tensor, bad: torch.Tensor, sampling: SamplingBatch, ctx: ModelRunnerContext
) -> LogitsProcessor | None:
    """Return the processor that leaves nothing of good logits either, in one of the rows that are bad."""
    import torch

    for processor in ctx.processors if sampling.rows else ():
        good = torch.linspace(-1.0, 1.0, logits.shape[1], device=logits.device).repeat(logits.shape[0], 1)
        with contextlib.suppress(Exception):
            state = processor.prepare(sampling.rows)
            if state is not None:
                processor.apply(good, state)
            if bool((_unfit(good) & bad).any()):
                return processor
    return None
