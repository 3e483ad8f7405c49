"""For runners: masks that allow only the tokens of a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pegboard.core.interfaces.sampling import SamplingBatch

_BITS = 32


def apply_token_mask(logits: torch.Tensor, sampling: SamplingBatch) -> None:
    """Set `logits` float32 [n, vocab] of tokens that `sampling.mask` does not allow to -inf, in place.

    Call it after all logits processors, and before anything is sampled or any logprob taken. Where processors have left
    a row none of the tokens that it may get, all of these become equally likely: the grammar has the last word.
    """
    if sampling.mask is None or sampling.mask_rows is None:
        return
    rows = sampling.mask_rows
    whole = rows.shape[0] == logits.shape[0]
    chosen = logits if whole else logits.index_select(0, rows)
    forbidden = ~unpack_mask(sampling.mask, logits.shape[1])
    chosen = chosen.masked_fill_(forbidden, -torch.inf)
    # Reading a flag would wait for the device, so this is done for every row.
    dead = (chosen.amax(-1, keepdim=True) == -torch.inf).expand_as(chosen)
    chosen.masked_fill_(dead & ~forbidden, 0.0)
    if not whole:
        logits.index_copy_(0, rows, chosen)


def unpack_mask(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bits int32 [n, words] as bool [n, vocab_size]."""
    if mask.device.type == "cpu":
        import numpy as np

        bits = np.unpackbits(mask.numpy().view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    shifts = torch.arange(_BITS, dtype=torch.int32, device=mask.device)
    return ((mask[:, :, None] >> shifts) & 1).view(mask.shape[0], -1)[:, :vocab_size].to(torch.bool)
