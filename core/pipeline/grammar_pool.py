"""GrammarPool: a few helper processes that compile grammars, each driven by a thread of this one."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.grammar_worker import Frames, Reply, Start, Work
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.toolkit.environment import helper_environment

if TYPE_CHECKING:
    from pegboard.core.interfaces.grammar import CompiledGrammar, Grammar, GrammarBackend

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""What a worker gets for importing its libraries and reading the tokenizer."""
GRACE_SECONDS = 3.0
"""After the time limit a worker is killed; this much later it would have ended by itself."""
MAX_REPLY = 512 * 2**20


class WorkerFailed(Exception):
    """A worker died, hung or could not start. `code` as of an InvalidRequest; `status` likewise."""

    def __init__(self, message: str, code: str, status: int) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Seconds for one compilation and for the wait before it, and how many may wait."""

    workers: int = 1
    compile_timeout: float = 10.0
    queue_timeout: float = 60.0
    max_queued: int = 64


class GrammarPool:
    """Compiles grammars off the loop. Processes start when the first grammar comes, and again after one was killed.

    Never blocks but in `close`. The result is loaded in the pool's thread as well: the loop only takes it.
    """

    def __init__(self, start: Start, backend: GrammarBackend, limits: PoolLimits) -> None:
        self._start = start
        self._backend = backend
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.workers, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._open = 0
        self._closed = False
        self.killed = 0
        """Workers that were killed or have died, since the start."""

    @property
    def full(self) -> bool:
        """Whether no more grammars are taken for now."""
        return self._open >= self._limits.workers + self._limits.max_queued

    @property
    def open(self) -> int:
        """Grammars that are being compiled or wait for it."""
        return self._open

    def submit(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Compile it some time. The future raises InvalidRequest; cancelling it before its turn saves the work."""
        with self._lock:
            self._open += 1
        future = self._threads.submit(self._compile, grammar, time.monotonic())
        future.add_done_callback(self._done)
        return future

    def close(self) -> None:
        """End all workers and wait for the threads. May be called twice."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, []
            self._idle = []
        for worker in workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in workers:
            worker.dispose()

    def pids(self) -> list[int]:
        """Of the workers that are there, for tests and whoever wonders."""
        with self._lock:
            return [worker.pid for worker in self._workers if worker.pid]

    def _done(self, _: Future[CompiledGrammar]) -> None:
        with self._lock:
            self._open -= 1

    def _compile(self, grammar: Grammar, since: float) -> CompiledGrammar:
        waited = time.monotonic() - since
        if waited > self._limits.queue_timeout:
            text = f"{grammar.kind}: no worker was free for {waited:.0f} s, try again later"
            raise InvalidRequest(text, param=grammar.kind, code="grammar_queue_full", status=503)
        try:
            reply = self._ask(grammar)
        except WorkerFailed as error:
            text = f"{grammar.kind}: {error}"
            raise InvalidRequest(text, param=grammar.kind, code=error.code, status=error.status) from None
        if reply.status:
            raise InvalidRequest(reply.error, param=reply.param, code=reply.code, status=reply.status)
        return self._backend.load(grammar, reply.compiled)

    def _ask(self, grammar: Grammar) -> Reply:
        worker = self._take()
        try:
            return worker.compile(grammar, self._limits.compile_timeout)
        except BaseException:
            worker.kill()
            self.killed += 1
            raise
        finally:
            self._give(worker)

    def _take(self) -> _Worker:
        """An idle worker, or a new one: there are never more than threads."""
        with self._lock:
            if self._closed:
                raise WorkerFailed("the engine is closing", "shutting_down", 503)
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                self._workers.remove(worker)
                worker.dispose()
            worker = _Worker()
            self._workers.append(worker)
        try:
            worker.start(self._start)
        except BaseException:
            worker.kill()
            self._give(worker)
            raise
        return worker

    def _give(self, worker: _Worker) -> None:
        with self._lock:
            if worker not in self._workers:
                return  # closed meanwhile
            if worker.alive:
                self._idle.append(worker)
                return
            self._workers.remove(worker)
        worker.dispose()


class _Worker:
    """One process. Used by one thread at a time; `kill` may come from another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._frames: Frames | None = None
        self._deadline = 0.0
        self._lock = threading.Lock()
        self._killed = False

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._killed and self._process.poll() is None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def start(self, start: Start) -> None:
        """Raises WorkerFailed where it does not get ready."""
        with self._lock:
            if self._killed:
                raise WorkerFailed("the engine is closing", "shutting_down", 503)
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "pegboard.core.grammar_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=helper_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"),
            )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        self._frames = Frames(self._read, self._write)
        try:
            reply = self._exchange(start, START_SECONDS)
        except TimeoutError:
            raise WorkerFailed("the grammar worker did not get ready", "grammar_worker_failed", 500) from None
        if reply.error:
            raise WorkerFailed(f"the grammar worker cannot start: {reply.error}", "grammar_worker_failed", 500)

    def compile(self, grammar: Grammar, seconds: float) -> Reply:
        """Raises WorkerFailed where time is up or the process dies."""
        try:
            return self._exchange(Work(grammar, seconds + GRACE_SECONDS), seconds)
        except TimeoutError:
            text = f"compiling this grammar takes longer than the {seconds:g} s that it may; make it simpler"
            raise WorkerFailed(text, "grammar_timeout", 400) from None
        except (EOFError, OSError):
            raise WorkerFailed("compiling this grammar ended the process that did it", "grammar_failed", 400) from None

    def kill(self) -> None:
        """End it at once. Whoever waits for its answer learns of it by the end of the pipe."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def dispose(self) -> None:
        """Kill it, take its exit status and close the pipes; nobody may be using them."""
        self.kill()
        if self._process is not None:
            with self._process:
                pass

    def _exchange(self, message: Start | Work, seconds: float) -> Reply:
        assert self._frames is not None
        self._deadline = time.monotonic() + seconds
        self._frames.send(message)
        data = self._frames.receive()
        if not data:
            raise EOFError
        return msgspec.msgpack.decode(data, type=Reply)

    def _read(self, count: int) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        if count > MAX_REPLY:
            raise EOFError
        file = self._process.stdout.fileno()
        self._wait(file, select.POLLIN)
        return os.read(file, min(count, 1 << 20))

    def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        file = self._process.stdin.fileno()
        view = memoryview(data)
        while view:
            self._wait(file, select.POLLOUT)
            try:
                view = view[os.write(file, view) :]
            except BlockingIOError:
                continue

    def _wait(self, file: int, event: int) -> None:
        left = self._deadline - time.monotonic()
        poll = select.poll()
        poll.register(file, event)
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError
