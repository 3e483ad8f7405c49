"""TurnThreads: a few threads, and a queue before them in which askers take turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from pegboard.toolkit.system.turn_queue import TurnQueue

_Job = tuple[Callable[[], None], Future[None]]


class TurnThreads:
    """Does work in at most so many threads, which start when they are needed: askers in turns, short work first
    (`TurnQueue`). At most `most_each` threads work for one asker at one time (None: all). Thread-safe.
    """

    def __init__(self, threads: int, name: str, *, most_each: int | None = None) -> None:
        self._most = threads
        self._name = name
        self._queue: TurnQueue[_Job] = TurnQueue(most_each=most_each, dead=lambda job: job[1].cancelled())
        self._lock = threading.Lock()
        self._threads = 0

    def submit(self, work: Callable[[], None], asker: str = "", seconds: float = 0.0) -> Future[None]:
        """Do it when its turn comes; `seconds` is what it is expected to take. Raises RuntimeError where no thread is
        there and none can be started, and after `close`.
        """
        future: Future[None] = Future()
        with self._lock:
            if self._threads < self._most:
                self._start()
        if not self._queue.put((work, future), asker, seconds):
            raise RuntimeError(f"the threads of {self._name} have ended")
        return future

    def close(self) -> None:
        """Cancel what waits. What is being done goes on. May be called twice."""
        for _, future in self._queue.close():
            future.cancel()

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads += 1

    def _serve(self) -> None:
        while (found := self._queue.get()) is not None:
            asker, (work, future) = found
            if future.set_running_or_notify_cancel():
                try:
                    work()
                    future.set_result(None)
                except BaseException as error:
                    future.set_exception(error)
            self._queue.done(asker)
            # Else they would be kept until the next one comes.
            del found, work, future
