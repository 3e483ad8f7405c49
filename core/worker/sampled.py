"""Looking at sampled tokens before anything builds on them. Faults are told of `by`, the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.sampler import NO_TOKEN
from pegboard.toolkit.system.culprits import BadTokens

if TYPE_CHECKING:
    from numpy.typing import NDArray


def check_tokens(tokens: object, count: int, device: torch.device, by: object) -> None:
    """Raise BadTokens unless these may be one token for each of `count` rows. Looks at no number, so it never waits."""
    if not isinstance(tokens, torch.Tensor):
        raise BadTokens(f"sampled tokens must be a tensor, and not a {type(tokens).__name__}", by)
    if tokens.dtype is not torch.int64 or tokens.shape != (count,) or tokens.device.type != device.type:
        given = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)} on {tokens.device.type}"
        raise BadTokens(f"sampled tokens must be int64 [{count}] on {device.type}, and not {given}", by)


def check_ids(tokens: NDArray[np.int64], vocab_size: int, by: object) -> bool:
    """Return whether some rows have got NO_TOKEN. Raises BadTokens for an id that is none of the vocabulary's."""
    # As unsigned numbers, negative ones are large too: one look for both.
    if not tokens.shape[0] or tokens.view(np.uint64).max() < vocab_size:
        return False
    wrong = (tokens.view(np.uint64) >= vocab_size) & (tokens != NO_TOKEN)
    if wrong.any():
        row = int(wrong.argmax())
        raise BadTokens(f"the sampled token {tokens[row]} of row {row} is none of the vocabulary's {vocab_size}", by)
    return True
