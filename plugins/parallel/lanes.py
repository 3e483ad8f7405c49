"""Lanes: batches that are under way at once where a model is computed in sections. While the ranks of the first section
wait for what the last one makes of one batch, they compute their own layers for the next.

Rank 0 decides in which order: before it begins with a batch it sends the batch, and before it goes on with one it says
so. The other ranks of its section do the same in the order in which they are told.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from pegboard.core.interfaces.batch import StageWork
from pegboard.core.interfaces.executor import Executor

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import ModelWorkerBatch, TableChanges
    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.executor import Pending

R = TypeVar("R")
COUNT = 2
"""Lanes of a model in sections: the loop has two steps under way at most."""


class Lanes:
    """Runs what it is given in that order, each in a thread, but only one of them at a time: the next one begins when
    the one before it has ended or waits, in `waiting`. `goes_on` is called before one goes on.
    """

    def __init__(self, goes_on: Callable[[], object] = lambda: None) -> None:
        self._goes_on = goes_on
        self._threads = ThreadPoolExecutor(COUNT, thread_name_prefix="lane")
        self._changed = threading.Condition()
        self._given = 0  # how many were given
        self._begun = 0  # how many have begun
        self._open: set[int] = set()  # those that have not ended, by number
        self._busy = False  # whether one of them runs and does not wait
        self._own = threading.local()

    def submit(self, run: Callable[[], R], *, alone: bool = False) -> Future[R]:
        """Run this after all that was given before; `alone`: once all of that has ended. One thread calls this."""
        with self._changed:
            self._given += 1
            self._open.add(self._given)
        return self._threads.submit(self._run, self._given, run, alone)

    def _run(self, number: int, run: Callable[[], R], alone: bool) -> R:
        self._enter(lambda: self._begun == number - 1 and (not alone or min(self._open) == number))
        self._begun = self._own.number = number
        try:
            return run()
        finally:
            self._leave(ended=number)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Let the next one run meanwhile. What is waited for comes in order: the wait begins once all earlier ones have
        ended.
        """
        number = self._own.number
        self._leave()
        with self._changed:
            self._changed.wait_for(lambda: min(self._open) == number)
        try:
            yield
        finally:
            self._enter(lambda: self._may_go_on(number))
        self._goes_on()

    def _may_go_on(self, number: int) -> bool:
        return True

    def _enter(self, may: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and may())
            self._busy = True

    def _leave(self, ended: int = 0) -> None:
        with self._changed:
            self._busy = False
            self._open.discard(ended)
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for all that was given."""
        self._threads.shutdown(wait=True)


class FollowingLanes(Lanes):
    """Those of another rank of the first section, whose main thread calls `run` and `go_on` as rank 0 says, and nothing
    else meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._told = 0  # the last one that may go on
        self._closed = False
        self._futures: dict[int, Future[object]] = {}

    def run(self, run: Callable[[], object]) -> None:
        """Return once this has ended or waits. Raises what it raises."""
        future = self.submit(run)
        number = self._given
        self._futures[number] = future
        with self._changed:
            self._changed.wait_for(lambda: self._begun == number and not self._busy)
        if number not in self._open:
            self._futures.pop(number).result()

    def go_on(self) -> None:
        """Let the one that has waited for longest go on, and return once it has ended. Raises what it raises."""
        with self._changed:
            self._told = min(self._open)
            self._changed.notify_all()
        self._futures.pop(self._told).result()

    def _may_go_on(self, number: int) -> bool:
        return number <= self._told or self._closed

    def close(self) -> None:
        """End what waits: what it waits for raises, since the ranks have left each other."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()


class LanesExecutor(Executor):
    """Runs batches by `ranks`, in lanes. One that needs tokens of another one, or is a stage's work, is run alone."""

    def __init__(self, ranks: Executor, lanes: Lanes) -> None:
        self.lanes = COUNT
        self._ranks = ranks
        self._lanes = lanes

    def submit(self, work: ModelWorkerBatch | StageWork) -> Pending[object]:
        alone = isinstance(work, StageWork) or work.future_indices is not None
        return self._lanes.submit(lambda: self._ranks.submit(work).result(), alone=alone)

    def rerun(self, work: ModelWorkerBatch) -> BatchResult:
        return self._lanes.submit(lambda: self._ranks.rerun(work), alone=True).result()

    def ask(self, stage: str, payload: object, table: TableChanges | None = None) -> object:
        return self._lanes.submit(lambda: self._ranks.ask(stage, payload, table), alone=True).result()

    def healthy(self) -> bool:
        return self._ranks.healthy()

    def close(self) -> None:
        self._lanes.close()
        self._ranks.close()
