"""HelperPool: helper processes, each with a thread of its own that waits for it, and a queue before them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Generic, TypeVar

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.system.helper_child import HelperChild, Look
from pegboard.toolkit.system.helper_process import HelperLost
from pegboard.toolkit.system.turn_queue import TurnQueue

J = TypeVar("J")
A = TypeVar("A")

ATTEMPTS = 2
"""A job whose helper is lost through no fault of its own gets a fresh one, once."""
UNWANTED_SECONDS = 1.0
"""A job that is not wanted any more costs its helper once it has taken so long."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HelperKind(Generic[J, A]):
    """What a pool has to know of its helpers. `start` starts one and gets it ready; `work` does one job with it. Both
    call what they are given now and then. What they raise is what the job's future raises, but for HelperLost, an
    accident of the server's; the helper is of no more use then. With an error that `work` returns, it is as good as
    ever. `lost` makes the error of a job that has had `ATTEMPTS` accidents, `closing` that of one which is not done
    when the pool closes.
    """

    name: str
    start: Callable[[Look], HelperChild]
    work: Callable[[HelperChild, J, Look], A | Exception]
    lost: Callable[[str], Exception]
    closing: Callable[[], Exception]


@dataclass(slots=True)
class _Seat:
    """A thread's helper, and the jobs that it has done."""

    helper: HelperChild | None = None
    done: int = 0


class _Unwanted(Exception):
    """The job's future was cancelled."""


class HelperPool(Generic[J, A]):
    """Does jobs in helper processes: askers in turns, short jobs first (`TurnQueue`). Threads and processes start when
    they are needed, and a process ends after so many `jobs`, if that is set: libraries that read foreign files leave
    memory in pieces.

    Never blocks but in `close`. It is for its user to bound how many jobs wait.
    """

    def __init__(self, kind: HelperKind[J, A], *, helpers: int = 1, jobs: int | None = None) -> None:
        self._kind = kind
        self._most = helpers
        self._jobs = jobs
        self._waiting: TurnQueue[tuple[J, Future[A]]] = TurnQueue(
            dead=lambda job: job[1].cancelled(), dropped=lambda job: self._ended()
        )
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._helpers: set[HelperChild] = set()
        self._unfinished = 0
        self._closed = False
        self.lost = 0
        """Helpers that were killed or stopped from outside, since the start."""

    def submit(self, job: J, asker: str = "", seconds: float = 0.0) -> Future[A]:
        """Do it when its turn comes; `seconds` is what it is expected to take. Cancelling the future saves the work, as
        far as it is not done.
        """
        future: Future[A] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(self._kind.closing())
                return future
            if len(self._threads) < min(self._unfinished + 1, self._most):
                self._start_thread()
            if not self._threads:
                text = f"no thread can be started for {self._kind.name} at the moment; try again later"
                future.set_exception(InvalidRequest(text, code="no_thread", status=503))
                return future
            self._unfinished += 1
        if not self._waiting.put((job, future), asker, seconds):
            self._give_up(future)
        return future

    def _start_thread(self) -> None:
        """Start one more thread. Where the system gives none it is tried again with the next job."""
        name = f"{self._kind.name}-{len(self._threads)}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            logger.exception("no thread for %s", name)
        else:
            self._threads.append(thread)

    def close(self) -> None:
        """End the helpers and wait for the threads; what is not done fails. May be called twice."""
        with self._lock:
            self._closed = True
            for helper in self._helpers:
                helper.kill()
        for _, future in self._waiting.close():
            self._give_up(future)
        for thread in self._threads:
            thread.join()

    @property
    def unfinished(self) -> int:
        """Jobs that are being done, or wait for it."""
        return self._unfinished

    def pids(self) -> list[int]:
        """Of the helpers that are there."""
        with self._lock:
            return [helper.pid for helper in self._helpers]

    # ---- in the pool's threads ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        seat = _Seat()
        try:
            while (found := self._waiting.get()) is not None:
                asker, (job, future) = found
                self._settle(seat, job, future)
                self._ended()
                self._waiting.done(asker)
                # Else it would keep this job until the next one comes.
                del found, job, future
        finally:
            self._end(seat)

    def _ended(self) -> None:
        with self._lock:
            self._unfinished -= 1

    def _settle(self, seat: _Seat, job: J, future: Future[A]) -> None:
        result: A | BaseException
        try:
            result = self._done(seat, job, future)
        except _Unwanted:
            # By this future, unless the pool is closed.
            self._give_up(future)
            return
        except BaseException as error:
            result = error
        # Cancelled meanwhile: it is not wanted any more.
        with contextlib.suppress(InvalidStateError):
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

    def _give_up(self, future: Future[A]) -> None:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(self._kind.closing())

    def _done(self, seat: _Seat, job: J, future: Future[A]) -> A | Exception:
        """Do a job; the seat's helper is as good as new afterwards, or gone."""

        def look(seconds: float) -> None:
            if self._closed or (seconds >= UNWANTED_SECONDS and future.cancelled()):
                raise _Unwanted

        why = ""
        for _ in range(ATTEMPTS):
            try:
                helper = self._helper_of(seat, look)
                result = self._kind.work(helper, job, look)
            except HelperLost as lost:
                self._end(seat)
                if self._closed:
                    raise _Unwanted from None
                why = str(lost)
                self.lost += 1
                logger.warning("a helper process (%s) was lost: %s", self._kind.name, why)
                continue
            except BaseException:
                self._end(seat)
                raise
            seat.done += 1
            if seat.done == self._jobs:
                self._end(seat)
            return result
        raise self._kind.lost(why)

    def _helper_of(self, seat: _Seat, look: Look) -> HelperChild:
        """Return the thread's helper, or a new one."""
        if seat.helper is None:
            seat.helper = self._kind.start(look)
            with self._lock:
                self._helpers.add(seat.helper)
                if self._closed:
                    seat.helper.kill()
        return seat.helper

    def _end(self, seat: _Seat) -> None:
        if seat.helper is not None:
            seat.helper.close()
            with self._lock:
                self._helpers.discard(seat.helper)
            seat.helper, seat.done = None, 0
