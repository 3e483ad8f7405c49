"""Reading rows of a buffer."""

from __future__ import annotations

import torch

from pegboard.plugins.attn_torch.plan import MOST_TOKENS, Rows


def take(source: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return rows of `source`: a view where they follow each other, else a copy."""
    return source[rows] if isinstance(rows, slice) else source.index_select(0, rows)


class Scratch:
    """Memory for copies that are used up before the next one is made.

    On a CPU, megabytes that were just allocated cost more in page faults than in copying: for 32 requests of 200 tokens
    in float32, memory that is there already halves the time of a layer. It grows to MOST_TOKENS rows at most.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._host = device.type == "cpu"
        self._buffer = torch.empty(0, dtype=dtype, device=device)
        self._capacity = 0

    def take(self, source: torch.Tensor, rows: Rows) -> torch.Tensor:
        """As the function `take`, valid until the next call."""
        if isinstance(rows, slice):
            return source[rows]
        count = rows.shape[0]
        if not self._host or count > MOST_TOKENS:
            return source.index_select(0, rows)
        size = count * source.stride(0)
        if size > self._capacity:
            self._capacity = min(2 * size, MOST_TOKENS * source.stride(0))
            # An inference tensor could not be written to outside of inference mode later.
            with torch.inference_mode(False):
                self._buffer = self._buffer.new_empty(self._capacity)
        out = self._buffer[:size].view(count, *source.shape[1:])
        return torch.index_select(source, 0, rows, out=out)
