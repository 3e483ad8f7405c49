"""Linear layers with their weights packed by oneDNN, once instead of in every product. For CPUs.

One core of a Sapphire Rapids, the products of one step of SmolLM2-135M's 30 layers, time packed by time unpacked: in
bfloat16 0.6 for 1 to 8 tokens, 0.7 for 32 and for 512, and the same numbers to the last bit, since torch leaves these
products to oneDNN in any case. In float32 1.2 for one token, 0.6 for 8, 0.9 for 128, sums in another order, and 100 MB
and more for the code that oneDNN generates and keeps for every number of tokens: not worth it.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16,)


@functools.cache
def why_not_packed(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return None where weights of this type can be packed on this device, or the reason why not.

    It is tried out: what a CPU has products for is oneDNN's affair, and its operators are internal ones of torch, which
    another version may lack.
    """
    if device.type != "cpu":
        return f"packed weights are for CPUs, not for {device}"
    if dtype not in DTYPES:
        return f"weights of {str(dtype).removeprefix('torch.')} gain too little by it"
    try:
        x, weight = torch.ones(3, 40, dtype=dtype), torch.ones(17, 40, dtype=dtype)
        found, expected = packed_linear(x, pack(weight)), F.linear(x, weight)
    except (RuntimeError, AttributeError, TypeError) as error:
        return f"this torch cannot pack {str(dtype).removeprefix('torch.')}: {str(error).splitlines()[0]}"
    return None if torch.equal(found, expected) else "oneDNN's products of packed weights are wrong on this CPU"


def pack(weight: Tensor) -> Tensor:
    """Return a copy of `weight` [out, in] in a layout of oneDNN's choice, which only `packed_linear` can read."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear(x, weight, bias)`` for x [tokens, in] in the weight's dtype: [tokens, out]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
