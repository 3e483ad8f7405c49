"""GrammarPool: a few helper processes that compile grammars, each driven by a thread of this one."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.grammar.process import WorkerFailed, compile_in, get_ready, new_worker
from pegboard.plugins.grammar.queue import GrammarJob, GrammarQueue
from pegboard.toolkit.system.helper_process import HelperLost

if TYPE_CHECKING:
    from pegboard.core.interfaces.sampling import Grammar
    from pegboard.plugins.grammar.api import CompiledGrammar, GrammarBackend
    from pegboard.plugins.grammar.worker import Reply, Start
    from pegboard.toolkit.system.helper_child import HelperChild

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""A grammar whose worker is lost through no fault of its own gets a fresh one, once."""


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Seconds for one compilation, for the wait before it, and before a compilation may have to give way to a new one;
    how many may wait.
    """

    workers: int = 1
    compile_timeout: float = 10.0
    queue_timeout: float = 60.0
    max_queued: int = 64
    first_slice: float = 1.0


class _GivesWay(Exception):
    """A compilation ends here, since a new grammar wants its worker."""


class _Unwanted(Exception):
    """A compilation ends here, since no request waits for it any more."""


@dataclass(slots=True)
class _Seat:
    """A thread's worker."""

    worker: HelperChild | None = None


class GrammarPool:
    """Compiles grammars off the loop. Processes start when the first grammar comes, and again after one was killed.

    Never blocks but in `close`. The result is loaded in the pool's threads as well, and what `prepare` makes of
    it there is what futures have: the loop only takes it.
    """

    def __init__(
        self,
        start: Start,
        backend: GrammarBackend,
        limits: PoolLimits,
        prepare: Callable[[CompiledGrammar], CompiledGrammar] | None = None,
    ) -> None:
        self._start = start
        self._backend = backend
        self._limits = limits
        self._prepare = prepare
        self._queue = GrammarQueue(limits.workers, limits.queue_timeout)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._workers: set[HelperChild] = set()
        self._open = 0
        self._closed = False
        self.killed = 0
        """Workers that were lost, have crashed or took too long, since the start."""

    @property
    def full(self) -> bool:
        """Whether no more grammars are taken for now."""
        return self._open >= self._limits.workers + self._limits.max_queued

    @property
    def open(self) -> int:
        """Grammars that are being compiled or wait for it."""
        return self._open

    def submit(self, grammar: Grammar, owner: str = "") -> Future[CompiledGrammar]:
        """Compile it some time; owners take turns. The future raises InvalidRequest; cancelling it saves the work."""
        job = GrammarJob(grammar, owner)
        with self._lock:
            self._open += 1
        job.future.add_done_callback(self._done)
        useful = self._queue.put(job)
        with self._lock:
            closed = self._closed
            if not closed and len(self._threads) < min(useful, self._limits.workers):
                name = f"grammar-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
                self._threads[-1].start()
        if closed:
            job.future.cancel()  # calls `_done`, which wants the lock
        return job.future

    def make_room(self, owner: str) -> bool:
        """Where the pool is full: whether there is room for a grammar of this owner, because the one with most has to
        wait with its newest, which fails with 503.
        """
        job = self._queue.push_out(owner)
        if job is None:
            return False
        kind = job.grammar.kind
        text = f"{kind}: too many grammars wait to be compiled, most of them with this API key; try again later"
        with contextlib.suppress(InvalidStateError):
            job.future.set_exception(InvalidRequest(text, param=kind, code="grammar_queue_full", status=503))
        return True

    def close(self) -> None:
        """End all workers and wait for the threads. May be called twice."""
        with self._lock:
            self._closed = True
            workers = list(self._workers)
        for job in self._queue.close():
            job.future.cancel()
        for worker in workers:
            worker.kill()
        for thread in self._threads:
            thread.join()

    def pids(self) -> list[int]:
        """Of the workers that are there."""
        with self._lock:
            return [worker.pid for worker in self._workers]

    def _done(self, _: Future[CompiledGrammar]) -> None:
        with self._lock:
            self._open -= 1

    # ---- in the pool's threads ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Do one job after the other in this thread, with one worker for as long as it lives."""
        seat = _Seat()
        while (job := self._queue.take()) is not None:
            try:
                result: CompiledGrammar | Exception = self._compile(job, seat)
            except _GivesWay:
                self._queue.put_back(job)
                continue
            except Exception as error:
                result = error
            except BaseException as error:
                # A panic in Rust is a BaseException only. Neither this thread nor the loop must end by it.
                logger.exception("loading a compiled grammar failed")
                result = RuntimeError(f"{type(error).__name__}: {error}")
            self._queue.done(job)
            # Cancelled meanwhile: it is not wanted any more.
            with contextlib.suppress(InvalidStateError):
                if isinstance(result, Exception):
                    job.future.set_exception(result)
                else:
                    job.future.set_result(result)
        self._end(seat)

    def _compile(self, job: GrammarJob, seat: _Seat) -> CompiledGrammar:
        grammar = job.grammar
        waited = time.monotonic() - job.since
        if waited > self._limits.queue_timeout:
            text = f"{grammar.kind}: no worker was free for {waited:.0f} s, try again later"
            raise InvalidRequest(text, param=grammar.kind, code="grammar_queue_full", status=503)
        try:
            reply = self._ask_twice(job, seat)
        except WorkerFailed as error:
            text = f"{grammar.kind}: {error}"
            raise InvalidRequest(text, param=grammar.kind, code=error.code, status=error.status) from None
        if reply.status:
            raise InvalidRequest(reply.error, param=reply.param, code=reply.code, status=reply.status)
        compiled = self._backend.load(grammar, reply.compiled)
        return compiled if self._prepare is None else self._prepare(compiled)

    def _ask_twice(self, job: GrammarJob, seat: _Seat) -> Reply:
        """Return the worker's reply; where one is lost by accident, that of a fresh one."""
        why = ""
        for _ in range(ATTEMPTS):
            try:
                return self._ask(job, seat)
            except HelperLost as error:
                if self._closed:
                    raise _closing() from None
                why = str(error)
                logger.warning("a process that compiles grammars was lost: %s", why)
        text = f"the process that compiles grammars was lost twice ({why}), through no fault of the grammar; try again"
        raise WorkerFailed(text, "grammar_worker_lost", 503)

    def _ask(self, job: GrammarJob, seat: _Seat) -> Reply:
        def look(seconds: float) -> None:
            if job.future.cancelled():
                raise _Unwanted
            if seconds >= self._limits.first_slice and self._queue.gives_way(job):
                raise _GivesWay

        try:
            return compile_in(self._worker_of(seat), job.grammar, self._limits.compile_timeout, look)
        except BaseException as error:
            self._end(seat)
            with self._lock:
                # One whose job gave way or is not wanted any more was as good as any.
                self.killed += isinstance(error, (HelperLost, WorkerFailed)) and not self._closed
            raise

    def _worker_of(self, seat: _Seat) -> HelperChild:
        """Return the thread's worker, or a new one."""
        if seat.worker is None:
            seat.worker = new_worker()
            with self._lock:
                self._workers.add(seat.worker)
                if self._closed:
                    seat.worker.kill()
            get_ready(seat.worker, self._start)
        return seat.worker

    def _end(self, seat: _Seat) -> None:
        if seat.worker is not None:
            with self._lock:
                self._workers.discard(seat.worker)
            seat.worker.close()
            seat.worker = None


def _closing() -> WorkerFailed:
    return WorkerFailed("the engine is closing", "shutting_down", 503)
