"""The jobs of a mover."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kind = Literal["save", "store", "find", "fetch"]
NO_PAGES = np.empty(0, np.int64)


class TransferJob:
    """A job. Its pages and keys stay as they were given; `moved` counts those that are through, from the first on.

    `ended` is notified when it ends. One thread at a time works on it, between `begin` and `pause` or `finish`. `store`
    is the storage that is asked just now, and `probe` whether its answer decides about that storage.
    """

    def __init__(
        self,
        ended: threading.Condition,
        kind: Kind,
        host: NDArray[np.int64] = NO_PAGES,
        *,
        device: NDArray[np.int64] = NO_PAGES,
        keys: Sequence[bytes] = (),
        store: int = 0,
    ) -> None:
        self.kind: Kind = kind
        self.host = host.copy()
        self.device = device.copy()
        self.keys = tuple(keys)
        self.store = store
        self.moved = 0
        self.probe = False
        self.stopping = False
        self.trouble = ""
        """Why a storage that was asked before could not say more."""
        self.done = False
        self.result = 0
        self.error = ""
        self._ended = ended
        self._running = False

    @property
    def total(self) -> int:
        """How many pages, blocks or keys it is about."""
        return len(self.keys) if self.keys else self.host.shape[0]

    def begin(self) -> bool:
        """Take it up in a thread; False where it is over already."""
        with self._ended:
            self._running = not self.done
            return self._running

    def pause(self) -> bool:
        """Let go of it in a thread; False where it was asked to stop, and is over now."""
        with self._ended:
            self._running = False
            if not self.stopping:
                return True
        self.finish("")
        return False

    def stop(self) -> bool:
        """Ask it to stop; whether it did, since no thread was at work on it."""
        with self._ended:
            self.stopping = True
            if self._running or self.done:
                return False
        return self.finish("")

    def finish(self, error: str) -> bool:
        """End it, with what was moved by now; False where it had ended. An error of one that got through is none."""
        with self._ended:
            if self.done:
                return False
            self.result = self.moved
            self.error = "" if self.moved >= self.total else error
            self.done = True
            self._ended.notify_all()
        return True
