"""TurnQueue: jobs of several askers that wait for threads. Askers take turns; of one asker's jobs short ones go
first.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

J = TypeVar("J")

PATIENCE = 100.0
"""A job goes before a longer one that came this many times the difference of their seconds earlier, or less. So short
jobs go first, and none waits for ever.
"""


@dataclass(slots=True)
class _Asker(Generic[J]):
    """The jobs of one asker: those that wait, as a heap, and how many are being done."""

    waiting: list[tuple[float, int, J]] = field(default_factory=list)
    under_way: int = 0


class TurnQueue(Generic[J]):
    """Jobs that wait. Thread-safe.

    An asker, such as an API key, has its next turn after every other one with jobs has had one, however many jobs it
    has. At most `most_each` jobs of an asker are under way at one time (None: any number); `done` notes that one is not
    any more. Jobs that are `dead` when their turn comes are given to `dropped`, and take no turn.
    """

    def __init__(
        self,
        *,
        most_each: int | None = None,
        dead: Callable[[J], bool] = lambda job: False,
        dropped: Callable[[J], None] = lambda job: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_each = most_each
        self._dead = dead
        self._dropped = dropped
        self._clock = clock
        self._ready = threading.Condition()
        self._askers: dict[str, _Asker[J]] = {}
        """In the order of their turns."""
        self._number = 0
        self._closed = False

    def put(self, job: J, asker: str = "", seconds: float = 0.0) -> bool:
        """Have a job wait that is expected to take so many seconds. False where the queue is closed."""
        with self._ready:
            if self._closed:
                return False
            self._number += 1
            due = self._clock() + PATIENCE * seconds
            heapq.heappush(self._askers.setdefault(asker, _Asker()).waiting, (due, self._number, job))
            self._ready.notify()
            return True

    def get(self) -> tuple[str, J] | None:
        """Wait for the next job; return its asker and it. None once the queue is closed."""
        with self._ready:
            while not self._closed:
                found = self._next()
                if found is not None:
                    return found
                self._ready.wait()
        return None

    def done(self, asker: str) -> None:
        """Note that a job of this asker is not under way any more."""
        with self._ready:
            known = self._askers[asker]
            known.under_way -= 1
            self._forget_idle(asker, known)
            self._ready.notify()

    def close(self) -> list[J]:
        """End: `get` returns None from now on. Return the jobs that still wait."""
        with self._ready:
            self._closed = True
            left = [job for asker in self._askers.values() for *_, job in sorted(asker.waiting, key=lambda one: one[1])]
            for asker in self._askers.values():
                asker.waiting.clear()
            self._ready.notify_all()
        return left

    def _next(self) -> tuple[str, J] | None:
        for name, asker in list(self._askers.items()):
            if self._most_each is not None and asker.under_way >= self._most_each:
                continue
            while asker.waiting:
                *_, job = heapq.heappop(asker.waiting)
                if self._dead(job):
                    self._dropped(job)
                    continue
                asker.under_way += 1
                # Its next turn is after that of all others.
                self._askers[name] = self._askers.pop(name)
                return name, job
            self._forget_idle(name, asker)
        return None

    def _forget_idle(self, name: str, asker: _Asker[J]) -> None:
        if not asker.waiting and not asker.under_way:
            del self._askers[name]
