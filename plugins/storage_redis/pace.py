"""Pace: how many blocks go over a connection at once."""

from __future__ import annotations

MOST_BYTES = 8 << 20
MOST_KEYS = 256
SECONDS = 0.25
"""How long what goes at once may take: between two of these the deadline is looked at."""
FIRST_RATE = 4e6
"""Bytes per second that are assumed before there is a measurement."""


class Pace:
    """Measures bytes per second in one direction, so that a slow server is asked for less at once. What several threads
    note at once may get lost.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._rate = FIRST_RATE

    @property
    def blocks(self) -> int:
        """How many blocks may go now: one at least."""
        return max(1, min(MOST_KEYS, int(min(MOST_BYTES, self._rate * SECONDS)) // self._block_bytes))

    def note(self, blocks: int, seconds: float) -> None:
        """Note what so many blocks took. Small ones say little, but take no time either."""
        if blocks:
            rate = blocks * self._block_bytes / max(seconds, 1e-6)
            self._rate += (rate - self._rate) / (2 if rate > self._rate else 1)
