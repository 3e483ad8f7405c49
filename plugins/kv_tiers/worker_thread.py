"""WorkerThread: jobs of one kind, and the thread that does them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

import torch

from pegboard.toolkit.system.compute import compute_alone

if TYPE_CHECKING:
    from collections.abc import Callable

    from pegboard.plugins.kv_tiers.transfer_jobs import TransferJob

logger = logging.getLogger(__name__)


class WorkerThread:
    """Does jobs in the order in which they came, one at a time, in a thread of its own.

    A thread that dies is started again, after `lost` has heard of its job. One that hangs can be abandoned: another
    takes over, and it ends when its call comes back.
    """

    def __init__(self, name: str, do: Callable[[TransferJob], None], lost: Callable[[TransferJob, str], None]) -> None:
        self.restarts = 0
        self._name = name
        self._do = do
        self._lost = lost
        self._jobs: deque[TransferJob] = deque()
        self._current: TransferJob | None = None
        self._closed = False
        self._stuck = False
        self._threads: list[threading.Thread] = []
        """All that have not ended; the last one takes jobs, unless it was abandoned."""
        self._taking: threading.Thread | None = None
        self._news = threading.Condition()
        self.start()

    def start(self) -> None:
        """Give it a thread where it has none."""
        with self._news:
            if self._closed or self._taking is not None:
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._taking, self._stuck = thread, False
            try:
                thread.start()
            except RuntimeError:  # the system gives no more; with the next job it is tried again
                self._taking = None
                logger.exception("no thread for %s", self._name)
                return
            self._threads = [old for old in self._threads if old.is_alive()] + [thread]

    def put(self, job: TransferJob) -> bool:
        """Queue a job; False where there is no thread to do it."""
        if self._taking is None and not self._stuck:
            self.start()
        with self._news:
            if self._closed or self._taking is None:
                return False
            self._jobs.append(job)
            self._news.notify_all()
            return True

    def drain(self) -> list[TransferJob]:
        """Take back all jobs that have not begun."""
        with self._news:
            jobs = list(self._jobs)
            self._jobs.clear()
            return jobs

    def abandon_thread(self, *, replace: bool) -> None:
        """Give the thread up that is at work now. Unless `replace`, no job is done until `start`."""
        with self._news:
            self._taking = self._current = None
            self._stuck = True
        if replace:
            self.start()

    def close(self) -> list[TransferJob]:
        """Take no more jobs, ask the one under way to stop, and return those that have not begun."""
        with self._news:
            self._closed = True
            current = self._current
            self._news.notify_all()
        if current is not None:
            current.stop()
        return self.drain()

    def join(self, seconds: float) -> bool:
        """Wait for its threads after `close`; whether all have ended."""
        for thread in self._threads:
            thread.join(max(0.0, seconds))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        me = threading.current_thread()
        job: TransferJob | None = None
        try:
            compute_alone()
            with torch.inference_mode():
                while (job := self._next(me)) is not None:
                    self._do(job)
        except BaseException as error:  # whatever it is, nothing above this would do anything about it
            self._died(me, job, error)

    def _next(self, me: threading.Thread) -> TransferJob | None:
        """Wait for a job; None where this thread has to end."""
        with self._news:
            if self._taking is me:
                self._current = None
            self._news.wait_for(lambda: self._jobs or self._closed or self._taking is not me)
            if self._closed or self._taking is not me:
                return None
            self._current = self._jobs.popleft()
            return self._current

    def _died(self, me: threading.Thread, job: TransferJob | None, error: BaseException) -> None:
        logger.error("a thread of %s died; another one takes over", self._name, exc_info=error)
        self.restarts += 1
        with self._news:
            if self._taking is me:
                self._taking = self._current = None
        if job is not None:
            self._lost(job, f"{self._name}: its thread died of {error!r}")
            self.start()
