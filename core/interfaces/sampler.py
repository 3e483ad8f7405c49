"""Contract: from logits to tokens."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.options import Component, OptionsT

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.forward import LogprobOutput
    from pegboard.core.interfaces.sampling import SamplingBatch, SamplingParams


NO_TOKEN = -1
"""What a row gets that no token can be drawn for: its logits hold NaN, or nothing finite."""


@dataclass(frozen=True, slots=True)
class SamplerContext:
    """Vocabulary size and device of the logits."""

    vocab_size: int
    device: torch.device


class Sampler(Component[OptionsT, SamplerContext]):
    """Draws one token per row. Filters apply in this order: temperature, top_k, top_p, min_p (as in the field).

    With the capability `seeded` a row's draw is a function of its logits, its parameters, its seed and its step alone,
    and rounding seldom changes it: in another batch a forward pass gives a row slightly different logits, and a seed is
    to mean the same tokens. Normal noise of 0.02 in all logits may change fewer than 5% of the draws of the suite, or
    than twice as many as the probabilities change by (in total variation) where that is more.
    Noise for each token achieves that: of those that the filters keep, draw the token with the largest
    `logit / temperature + gumbel(seed, step, token id)`. A uniform number that is looked up in the cumulated
    probabilities does not achieve it. `pegboard.toolkit.sampling.noise` has both kinds of numbers.

    With the capability `no_sync` neither method waits for the device: nothing is decided by what tensors hold, nothing
    copied to the device or back. `SamplingBatch.logprob_ids` has the token ids of logprobs there. Kernels are launched
    through `pegboard.toolkit.kernels.launch`, so that a test can leave them out.

    With the capability `params` requests may bring parameters for it: `SamplingParams.extra[<provider's name>]`, a dict
    of plain values from the network (see toolkit.custom_params). Where a request of the batch has some, `batch.rows`
    has every row's parameters, tokens and memo; what the sampler keeps of a request goes into `SamplingRow.memo`, under
    itself as the key. Steps may be repeated: count by the row's tokens and not by the calls. A config in which a logits
    processor of the same name takes parameters too is refused.
    """

    reads_output = False
    """Whether `sample` reads `SamplingRow.output_ids` (see `LogitsProcessor.reads_output`)."""

    def wants(self, params: SamplingParams) -> bool:
        """Return whether a request has parameters for this sampler. Asked once per request, with the capability
        `params` alone. Raises InvalidRequest, naming the parameter, for what it cannot do: the request is refused.
        """
        return False

    @abc.abstractmethod
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Return tokens int64 [n] from `logits` float32 [n, vocab], which it may overwrite.

        A row with temperature 0 gets the first argmax. A row's draw depends on its logits, its seed and its step
        alone, not on the other rows. A row whose logits hold NaN, or nothing finite, gets NO_TOKEN, and its request
        ends with an error: to raise, a sampler would have to wait for the device.

        Minus infinity rules a token out. So does `toolkit.logit_pairs.LAST_RESORT`, as long as the row has anything
        else: the draw is the same. A sampler that looks at how logits are spread leaves both out of account.
        """

    @abc.abstractmethod
    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        """Return logprobs of `tokens` int64 [n] and of whatever `batch.logprobs` asks for, from logits float32 [n,
        vocab] as they were before `sample`; does not change them.
        """
