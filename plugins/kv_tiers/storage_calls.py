"""StorageCalls of a storage: each has a deadline, and one that overruns is abandoned."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.plugins.kv_tiers.breaker import Breaker

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.plugins.kv_tiers.worker_thread import WorkerThread

GRACE_SECONDS = 1.0
"""How long a call may go on beyond its deadline: a storage looks at it only now and then."""
MOST_ABANDONED_THREADS = 4
"""Threads of one storage that hang and have been replaced, at most."""

Ask = Callable[[float], int]
"""A call of a storage, which gets its deadline and returns a count."""


@dataclass(eq=False)
class _Call:
    kind: str
    worker: WorkerThread
    deadline: float
    probe: bool
    abandoned: bool = False


class StorageCalls:
    """Makes a storage's calls, keeps its breaker, and gives up threads that do not come back.

    `began` hears that a call is under way, so that `supervise` is called from then on, and `opened` that the storage is
    to be left alone.
    """

    def __init__(self, name: str, clock: Clock, began: Callable[[], None], opened: Callable[[], None]) -> None:
        self.breaker = Breaker(f"the storage {name!r}", clock)
        self.abandoned = 0
        """StorageCalls that were abandoned, since the start."""
        self.abandoned_threads = 0
        """Those among them that have not come back yet."""
        self._name = name
        self._clock = clock
        self._began = began
        self._opened = opened
        self._calls: list[_Call] = []
        self._standing: set[WorkerThread] = set()
        """Workers whose threads were abandoned and not replaced."""
        self._lock = threading.Lock()

    @property
    def under_way(self) -> bool:
        """Whether a call is under way that may yet overrun."""
        return any(not call.abandoned for call in tuple(self._calls))

    @property
    def all_back(self) -> bool:
        """Whether no call is under way at all."""
        return not self._calls

    def make(
        self, kind: str, worker: WorkerThread, ask: Ask, most: int, seconds: float, *, probe: bool = False
    ) -> tuple[int, str]:
        """Ask a storage, in the thread of `worker`. Return its count, at most `most`, and why it is not to be asked
        further, "" where it is. `kind` says for what it is asked.
        """
        if not self.breaker.may(probe):
            return 0, f"the storage {self._name!r} is left alone for a while"
        call = _Call(kind, worker, self._clock() + seconds, probe)
        with self._lock:
            self._calls.append(call)
        self._began()
        count, trouble = 0, ""
        try:
            count = ask(call.deadline)
            if not 0 <= count <= most:
                count, trouble = 0, f"answered {count} for {most} keys"
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
        except BaseException as error:
            if not self._returned(call):
                self._fail(call, f"died of {error!r}")
            raise
        if self._returned(call):
            return 0, f"the storage {self._name!r} overran its deadline of {seconds:g} s"
        if not trouble and count < most and self._clock() >= call.deadline:
            trouble = f"did not get through in {seconds:g} s"
        if trouble:
            self._fail(call, trouble)
            return count, f"the storage {self._name!r}: {trouble}"
        self.breaker.succeeded(kind, probe)
        return count, ""

    def supervise(self) -> None:
        """Abandon calls that have overrun: their threads are abandoned, and the storage is left alone."""
        now = self._clock()
        with self._lock:
            late = [call for call in self._calls if not call.abandoned and now > call.deadline + GRACE_SECONDS]
            for call in late:
                call.abandoned = True
        self.abandoned += len(late)
        # First, so that no other thread begins with what waits behind them and hangs as well.
        for call in late:
            self._fail(call, "a call has overrun its deadline and is abandoned", at_once=True)
        for call in late:
            self._abandon(call)

    def _abandon(self, call: _Call) -> None:
        """Give up the thread of a call that was under way just now."""
        with self._lock:
            self.abandoned_threads += 1
            if call not in self._calls:  # it has come back since, and its thread is at work
                return
            replace = self.abandoned_threads <= MOST_ABANDONED_THREADS
            call.worker.abandon_thread(replace=replace)
            if not replace:
                self._standing.add(call.worker)

    def _fail(self, call: _Call, reason: str, *, at_once: bool = False) -> None:
        if self.breaker.failed(call.kind, reason, at_once=at_once, probe=call.probe):
            self._opened()

    def _returned(self, call: _Call) -> bool:
        """Note that a call is back; whether it had been abandoned."""
        with self._lock:
            self._calls.remove(call)
            if not call.abandoned:
                return False
            self.abandoned_threads -= 1
            workers = {call.worker, *self._standing}
            self._standing.clear()
        for worker in workers:
            worker.start()
        return True
