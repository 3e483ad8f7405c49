"""Virtual time."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the run began. Only the device, empty queues and waits for moves advance it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
