"""MediaStats: how many media were prepared, what that took, and why others were not."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.toolkit.media.inputs import MediaKind


class MediaStats:
    """Counters since the start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.items: Counter[MediaKind] = Counter()
        """Items that were prepared, by kind. Equal ones of one request count once."""
        self.failures: Counter[str] = Counter()
        """Items that were refused or failed, by code."""
        self.seconds = 0.0
        """Time that helpers were at work."""
        self.received_bytes = 0
        self.prepared_bytes = 0

    def prepared(self, kind: MediaKind, received: int, prepared: int) -> None:
        """Note an item, and its bytes as it was received and as pixels."""
        with self._lock:
            self.items[kind] += 1
            self.received_bytes += received
            self.prepared_bytes += prepared

    def failed(self, code: str) -> None:
        """Note an item that is refused."""
        with self._lock:
            self.failures[code] += 1

    def seconds_of(self, seconds: float) -> None:
        """Note that a helper was at work for so long."""
        with self._lock:
            self.seconds += seconds

    def figures(self) -> dict[str, object]:
        """Return all of them as plain values."""
        with self._lock:
            return {
                "items": dict(self.items),
                "failures": dict(self.failures),
                "seconds": self.seconds,
                "received_bytes": self.received_bytes,
                "prepared_bytes": self.prepared_bytes,
            }
