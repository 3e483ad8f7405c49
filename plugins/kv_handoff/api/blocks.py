"""Blocks of staging memory, taken and given back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
