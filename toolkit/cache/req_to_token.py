"""ReqToTokenPool: one row per scheduled request, mapping token positions to KV slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.batch import TableChanges

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


class ReqToTokenPool:
    """`host` int32 [max_rows + 1, width]: the scheduler's table, which it reads and writes without waiting.

    Row 0 is padding and never handed out. `width` is the context length rounded up to whole pages, since a row lists
    whole pages. With `mirrored`, what is written is noted, and `take_changes` hands it out with each batch: a worker
    that runs behind the scheduler, or on another device, keeps a table of its own that is as old as its batch.
    """

    def __init__(self, max_rows: int, max_context_len: int, page_size: int, *, mirrored: bool = False) -> None:
        self.max_rows = max_rows
        self.width = -(-max_context_len // page_size) * page_size
        self.mirrored = mirrored
        self.host: NDArray[np.int32] = np.zeros((max_rows + 1, self.width), dtype=np.int32)
        self._dirty: list[NDArray[np.int64]] = []
        self._free = list(range(max_rows, 0, -1))

    @property
    def free_rows(self) -> int:
        return len(self._free)

    @property
    def taken(self) -> int:
        return self.max_rows - len(self._free)

    def alloc(self) -> int:
        """Return a free row. Raises RuntimeError when there is none: admission has to keep within `free_rows`."""
        if not self._free:
            raise RuntimeError("no free request row: admission let in more requests than there are rows")
        return self._free.pop()

    def free(self, row: int) -> None:
        self._free.append(row)

    def write(self, row: int, start: int, slots: NDArray[np.int64]) -> None:
        """Set positions [start, start + n) of a row to `slots` int64 [n]."""
        stop = start + slots.shape[0]
        self.host[row, start:stop] = slots
        if self.mirrored and stop > start:
            self._dirty.append(np.arange(row * self.width + start, row * self.width + stop))

    def write_pages(
        self, rows: NDArray[np.int64], starts: NDArray[np.int64], pages: NDArray[np.int64], size: int
    ) -> None:
        """One new page for each of several rows: positions [start, start + size) of rows[i] become the slots of
        pages[i].
        """
        places, slots = rows * self.width + starts, pages * size
        if size > 1:
            offsets = np.arange(size)
            places = (places[:, None] + offsets).reshape(-1)
            slots = (slots[:, None] + offsets).reshape(-1)
        self.host.reshape(-1)[places] = slots
        if self.mirrored:
            self._dirty.append(places)

    def take_changes(self) -> TableChanges | None:
        """Return what was written since the last call; None for nothing, and where no worker mirrors the table."""
        if not self._dirty:
            return None
        places = self._dirty[0] if len(self._dirty) == 1 else np.concatenate(self._dirty)
        self._dirty.clear()
        return TableChanges(places, self.host.reshape(-1)[places])

    def send_again(self, changes: TableChanges | None) -> None:
        """Send changes that a failed batch may have kept from the worker with the next batch too, as they are then."""
        if changes is not None:
            self._dirty.append(changes.places)

    def device_table(self, device: torch.device) -> torch.Tensor:
        """Return a worker's table int32 [max_rows + 1, width]: the host's own memory, or a copy where it is
        mirrored.
        """
        import torch

        shared = torch.from_numpy(self.host)
        if not self.mirrored:
            return shared
        return shared.clone() if device.type == "cpu" else shared.to(device)
