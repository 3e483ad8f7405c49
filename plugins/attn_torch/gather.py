"""Reading rows of a buffer, in the type that attention computes in."""

from __future__ import annotations

import torch

from pegboard.plugins.attn_torch.plan import MOST_TOKENS, Rows
from pegboard.toolkit.model.eight_bit import is_eight_bit


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
        self._tables: dict[tuple[torch.dtype, float], torch.Tensor] = {}

    def take(self, source: torch.Tensor, rows: Rows, scale: float = 1.0) -> torch.Tensor:
        """As the function `take`, times `scale` and in the type of this memory; valid until the next call."""
        if source.dtype != self._buffer.dtype:
            return self._widened(take(source, rows), scale)
        if isinstance(rows, slice):
            return source[rows]
        out = self._room(rows.shape[0], source)
        return source.index_select(0, rows) if out is None else torch.index_select(source, 0, rows, out=out)

    def _widened(self, taken: torch.Tensor, scale: float) -> torch.Tensor:
        """Return rows of another type in that of this memory."""
        out = self._room(taken.shape[0], taken)
        if not is_eight_bit(taken.dtype):
            return taken.to(self._buffer.dtype) if out is None else out.copy_(taken)
        table, codes = self._table(taken.dtype, scale), taken.view(torch.uint8).reshape(-1).int()
        if out is None:
            return table.index_select(0, codes).view(taken.shape)
        torch.index_select(table, 0, codes, out=out.view(-1))
        return out

    def _table(self, dtype: torch.dtype, scale: float) -> torch.Tensor:
        """Return what each of the 256 codes of an 8-bit type stands for, rounded once: looking them up takes a fifth of
        the time of converting and multiplying, on a CPU.
        """
        key = dtype, scale
        if key not in self._tables:
            with torch.inference_mode(False):
                codes = torch.arange(256, dtype=torch.uint8, device=self._buffer.device).view(dtype)
                self._tables[key] = (codes.double() * scale).to(self._buffer.dtype)
        return self._tables[key]

    def _room(self, count: int, source: torch.Tensor) -> torch.Tensor | None:
        """Return memory for so many rows of `source`; None where they had better have memory of their own."""
        if not self._host or count > MOST_TOKENS:
            return None
        size = count * source.stride(0)
        if size > self._capacity:
            self._capacity = min(2 * size, MOST_TOKENS * source.stride(0))
            # An inference tensor could not be written to outside of inference mode later.
            with torch.inference_mode(False):
                self._buffer = self._buffer.new_empty(self._capacity)
        return self._buffer[:size].view(count, *source.shape[1:])
