"""Blocks of staging memory, taken and given back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pegboard.core.interfaces.kv_transfer import TransferError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.kv_transfer import Ranges
    from pegboard.toolkit.transfer.leases import Counts
    from pegboard.toolkit.transfer.pieces import Memory


class Blocks:
    """Blocks of `size` bytes each in memory uint8 [blocks * size], `first` bytes after the beginning of its region.
    Any thread may take one.
    """

    def __init__(self, memory: NDArray[np.uint8], size: int, first: int) -> None:
        self.size = size
        self.count = len(memory) // size
        self._memory = memory
        self._first = first
        self._lock = threading.Lock()
        # The last one that was given back is taken first: it may be in a cache still, and others need no memory yet.
        self._free = list(reversed(range(self.count)))

    @property
    def free(self) -> int:
        """How many are not taken."""
        return len(self._free)

    def take(self) -> int | None:
        """Return the number of a block that is the caller's now; None where all are taken."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, number: int) -> None:
        """Give a block back. Raises ValueError where it is not taken."""
        with self._lock:
            if number in self._free:
                raise ValueError(f"block {number} has been given back before")
            self._free.append(number)

    def offset(self, number: int) -> int:
        """Return where a block begins in its region."""
        return self._first + number * self.size

    def view(self, number: int) -> NDArray[np.uint8]:
        """Return the memory uint8 [size] of a block."""
        return self._memory[number * self.size :][: self.size]


class Landing:
    """Where small pieces are read to, before they are dealt out to the regions: blocks of the region `region`. Reads
    whose pieces have fewer than `below` bytes on average go there, and a step of theirs takes `seconds` at most.
    """

    def __init__(
        self, blocks: Blocks, region: int, regions: Memory, counts: Counts, below: int, clock: Clock, seconds: float
    ) -> None:
        self.blocks = blocks
        self.region = region
        self.below = below
        self.clock = clock
        self.seconds = seconds
        self._regions = regions
        self._counts = counts
        self._dealing = threading.Lock()
        self._closed = False

    def deal(self, block: int, target: Ranges) -> None:
        """Fill pieces of the regions out of a block. Raises TransferError after the end."""
        with self._dealing:
            if self._closed:
                raise TransferError("the engine is closed")
            self._regions.scatter(target, self.blocks.view(block)[: target.total])
        self._counts.add("staged_bytes_total", target.total)

    def close(self) -> None:
        """End. When this returns nothing is written to the regions."""
        with self._dealing:
            self._closed = True
