"""For runners: from logits to tokens, in the order that everybody expects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.toolkit.token_mask import apply_token_mask

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.forward import ForwardOutput
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
    put what is wanted into `output`: tokens, logprobs, the processed logits.
    """
    if sampling.rows:
        for processor in ctx.processors:
            state = processor.prepare(sampling.rows)
            if state is not None:
                processor.apply(logits, state)
    apply_token_mask(logits, sampling)
    # The sampler may overwrite what it reads, so whoever reads the logits after it needs a copy.
    kept = logits.clone() if sampling.want_logprobs or return_logits else logits
    output.next_token_ids = ctx.sampler.sample(logits, sampling)
    if sampling.want_logprobs:
        output.logprobs = ctx.sampler.logprobs(kept, output.next_token_ids, sampling)
    if return_logits:
        output.logits = kept
