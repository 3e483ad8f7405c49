"""Masks for a block of queries whose keys end with the block's last query."""

from __future__ import annotations

import torch


class CausalMasks:
    """Additive masks [rows, cols]: 0 where a query sees a key, -inf where it does not.

    Query i of a block stands at position end - rows + i and key j at end - cols + j, with the same `end` for both. So
    what is seen depends on the distance from the last row and the last column only: one mask per window, cut at its
    lower right corner, serves every block of every request, and no layer ever builds one.
    """

    def __init__(self, max_rows: int, max_cols: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_rows = max_rows
        self.max_cols = max_cols
        self._dtype = dtype
        self._device = device
        self._masks: dict[int | None, torch.Tensor] = {}

    def get(self, rows: int, cols: int, window: int | None) -> torch.Tensor:
        """Return a view, valid until the next call. `rows` is at most `max_rows`."""
        mask = self._masks.get(window)
        if mask is None or mask.shape[1] < cols:
            # Twice what is asked for, so that a growing conversation does not build a new one each turn.
            limit = self.max_cols if window is None else self.max_rows + window - 1
            mask = self._masks[window] = self._build(max(cols, min(2 * cols, limit)), window)
        return mask[self.max_rows - rows :, mask.shape[1] - cols :]

    def _build(self, cols: int, window: int | None) -> torch.Tensor:
        query = torch.arange(-self.max_rows, 0, device=self._device)[:, None]
        key = torch.arange(-cols, 0, device=self._device)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros((self.max_rows, cols), dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))
