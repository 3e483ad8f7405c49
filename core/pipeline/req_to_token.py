"""ReqToTokenPool: one row per scheduled request, mapping token positions to KV slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ReqToTokenPool:
    """`host` int32 [max_rows + 1, width] on the host, and the same table as a tensor on the model's device.

    The host's table is the truth: schedulers read and write it without waiting for a device. On a CPU both are one
    memory; elsewhere `sync` copies the ranges written since the last call, in one transfer. Row 0 is padding and
    never handed out. `width` is the context length rounded up to whole pages, since a row lists whole pages.
    """

    def __init__(self, max_rows: int, max_context_len: int, page_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.width = -(-max_context_len // page_size) * page_size
        self.device = device
        self.host: NDArray[np.int32] = np.zeros((max_rows + 1, self.width), dtype=np.int32)
        shared = torch.from_numpy(self.host)
        self.table = shared if device.type == "cpu" else shared.to(device)
        self._mirrored = device.type != "cpu"
        self._dirty: list[tuple[int, int, int]] = []
        self._free = list(range(max_rows, 0, -1))

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def alloc(self) -> int:
        """A free row. Raises RuntimeError when there is none: admission has to keep within `free_rows`."""
        if not self._free:
            raise RuntimeError("no free request row: admission let in more requests than there are rows")
        return self._free.pop()

    def free(self, row: int) -> None:
        self._free.append(row)

    def write(self, row: int, start: int, slots: NDArray[np.int64]) -> None:
        """Set positions [start, start + n) of a row to `slots` int64 [n]."""
        stop = start + slots.shape[0]
        self.host[row, start:stop] = slots
        if self._mirrored and stop > start:
            self._dirty.append((row, start, stop))

    def write_pages(
        self, rows: NDArray[np.int64], starts: NDArray[np.int64], pages: NDArray[np.int64], size: int
    ) -> None:
        """One new page for each of several rows: positions [start, start + size) of rows[i] become the slots of
        pages[i].
        """
        offsets = np.arange(size)
        self.host[rows[:, None], starts[:, None] + offsets] = pages[:, None] * size + offsets
        if self._mirrored:
            self._dirty.extend((int(r), int(s), int(s) + size) for r, s in zip(rows, starts, strict=True))

    def sync(self) -> None:
        """Bring the device's table up to date. Free on a CPU."""
        if not self._dirty:
            return
        rows = np.concatenate([np.full(stop - start, row) for row, start, stop in self._dirty])
        cols = np.concatenate([np.arange(start, stop) for _, start, stop in self._dirty])
        values = self.host[rows, cols]
        self._dirty.clear()
        flat = torch.from_numpy(rows.astype(np.int64) * self.width + cols).to(self.device)
        self.table.view(-1).index_copy_(0, flat, torch.from_numpy(values).to(self.device))
