"""The masks of batches with draft trees, in FlashInfer's bits.

A request's mask has a bit for each of its new tokens and each of its listed keys, row by row, the lowest bit of a byte
first. FlashInfer takes packed masks as they are, and places them by the numbers of *bits* before them, though its
kernel counts bytes from there: so does this layout, in which a request's bytes start as many bytes behind the first
one as there are bits before its own. The other way, masks of bools that FlashInfer packs, waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.attn_flashinfer.planning import Lens, Pages


@dataclass(frozen=True, slots=True)
class MaskShape:
    """Of a batch's masks: `columns` int64 [8, batch] is what `pack` reads on the device, `written` the bytes that hold
    bits, and `size` the bytes in all.
    """

    columns: NDArray[np.int64]
    written: int
    size: int


def mask_shape(lens: Lens, pages: Pages, page_size: int) -> MaskShape:
    """Return where the masks of a batch lie."""
    first = pages.firsts.astype(np.int64) * page_size
    keys = lens.seq - first
    bits = lens.new * keys
    count = (bits + 7) // 8
    places, packed = np.cumsum(bits) - bits, np.cumsum(count) - count
    tokens = np.cumsum(lens.new) - lens.new
    columns = np.stack([packed, places, bits, keys, first, lens.seq, lens.new, tokens])
    return MaskShape(columns, int(count.sum()), int(places[-1] + count[-1]))


def pack(
    shape: MaskShape,
    columns: torch.Tensor,
    counts: torch.Tensor,
    tail_lens: torch.Tensor,
    tail_bits: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Return the masks uint8 [shape.size] on the device; what lies between them has no meaning.

    `columns` are the shape's, and `counts` int64 [batch] the bytes that each request writes, both on the device.
    """
    device = columns.device
    order = torch.arange(columns.shape[1], device=device)
    owner = torch.repeat_interleave(order, counts, output_size=shape.written)
    packed, places, bits, keys, first, seq, new, tokens = (row[owner] for row in columns)
    tails = tail_lens[owner]
    byte = torch.arange(shape.written, device=device) - packed
    out = torch.zeros(shape.written, dtype=torch.uint8, device=device)
    for bit in range(8):
        at = torch.minimum(byte * 8 + bit, bits - 1)
        query, key = at // keys, at % keys + first
        own = tail_bits[tokens + query]
        out |= _seen(key, seq, new, query, tails, own, window).to(torch.uint8) << bit
    masks = torch.empty(shape.size, dtype=torch.uint8, device=device)
    masks[places + byte] = out
    return masks


def _seen(
    key: torch.Tensor,
    seq: torch.Tensor,
    new: torch.Tensor,
    query: torch.Tensor,
    tails: torch.Tensor,
    own: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    """Return which keys are seen, bool, as `ForwardBatch` has it: all arguments are of one query and key each."""
    start = seq - tails
    node = key - start  # negative: before the tail
    inside = node.clamp(0, 63)
    below = own & ((torch.ones_like(own) << inside) - 1)
    in_tail = node >= 0
    place = torch.where(tails > 0, start + _ones(own) - 1, seq - new + query)
    stands = torch.where((tails > 0) & in_tail, start + _ones(below), key)
    seen = torch.where((tails > 0) & in_tail, (own >> inside) & 1 == 1, key <= place)
    return seen if window is None else seen & (stands > place - window)


def _ones(bits: torch.Tensor) -> torch.Tensor:
    """Return how many bits are set, of int64. The sign that a shift draws in is masked away each time."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (bits * 0x0101010101010101) >> 56
