"""For runners: from logits to tokens, in the standard order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.toolkit.sampling.token_mask import apply_token_mask

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.forward import ForwardOutput
    from pegboard.core.interfaces.logits_processor import LogitsProcessor
    from pegboard.core.interfaces.model_runner import ModelRunnerContext
    from pegboard.core.interfaces.sampling import SamplingBatch, SamplingRow


def sample(
    logits: torch.Tensor,
    sampling: SamplingBatch,
    ctx: ModelRunnerContext,
    output: ForwardOutput,
    *,
    return_logits: bool = False,
) -> None:
    """Let processors, grammars' masks and the sampler at `logits` float32 [n, vocab], which are theirs to change, and
    put what is wanted into `output`: tokens, logprobs, the processed logits. It never waits for the device.
    """
    if sampling.rows:
        for processor in ctx.processors:
            state = processor.prepare(sampling.rows)
            if state is not None:
                processor.apply(logits, state)
    apply_token_mask(logits, sampling)
    # The sampler may overwrite what it reads, so what reads the logits after it needs a copy.
    kept = logits.clone() if sampling.want_logprobs or return_logits else logits
    output.next_token_ids = ctx.sampler.sample(logits, sampling)
    output.sampled_by = ctx.sampler
    if sampling.want_logprobs:
        output.logprobs = ctx.sampler.logprobs(kept, output.next_token_ids, sampling)
    if return_logits:
        output.logits = kept


def leaves_nothing(processor: LogitsProcessor, row: SamplingRow, vocab_size: int) -> bool:
    """Return whether a processor makes good logits of a row unfit for any sampler: NaN is among them, or nothing finite
    is. For looking into what has gone wrong: it waits for the device.
    """
    import torch

    good = torch.linspace(-1.0, 1.0, vocab_size, device=processor.ctx.device).repeat(1, 1)
    try:
        state = processor.prepare([row])
        if state is not None:
            processor.apply(good, state)
    except Exception:
        return False  # another fault, which is told of where it happens in a step
    return bool(good.isnan().any() | ~good.isfinite().any())
