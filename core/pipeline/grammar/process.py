"""GrammarProcess: one helper process that compiles grammars, as the thread sees it that waits for it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.pipeline.grammar.worker import Frames, Reply, Start, Work
from pegboard.toolkit.system.environment import helper_environment
from pegboard.toolkit.system.helper_process import HelperLost, Watch, ended_itself

if TYPE_CHECKING:
    from pegboard.core.interfaces.grammar import Grammar

START_SECONDS = 120.0
"""What a worker gets for importing its libraries and reading the tokenizer."""
GRACE_SECONDS = 3.0
"""After the time limit a worker is killed; this much later it would have ended by itself."""
END_SECONDS = 5.0
"""How long the exit status of a process may take whose pipe has ended."""
MAX_REPLY = 512 * 2**20


class WorkerFailed(Exception):
    """A worker failed at a grammar, or could not start. `code` as of an InvalidRequest; `status` likewise."""

    def __init__(self, message: str, code: str, status: int) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class GrammarProcess:
    """One process. Used by one thread at a time; `kill` may come from another.

    `start` and `compile` raise HelperLost where the process was killed or stopped from outside; after any error it is
    of no more use.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._frames = Frames(self._read, self._write)
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        self._killed = False

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._killed and self._process.poll() is None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    def start(self, start: Start) -> None:
        """Start it. Raises WorkerFailed where it does not get ready."""
        with self._lock:
            if self._killed:
                raise _closing()
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "pegboard.core.pipeline.grammar.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env=helper_environment(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"),
            )
        assert process.stdin is not None
        assert process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        try:
            reply = self._exchange(start, START_SECONDS)
        except TimeoutError:
            raise WorkerFailed("the grammar worker did not get ready", "grammar_worker_failed", 500) from None
        except (EOFError, OSError):
            self._see_how_it_ended()
            raise WorkerFailed("the grammar worker ended while it started", "grammar_worker_failed", 500) from None
        if reply.error:
            raise WorkerFailed(f"the grammar worker cannot start: {reply.error}", "grammar_worker_failed", 500)

    def compile(self, grammar: Grammar, seconds: float, look: Callable[[float], None]) -> Reply:
        """Compile a grammar. Raises WorkerFailed where time is up or the grammar ends the process, and whatever `look`
        raises: it is called with the seconds so far, now and then.
        """
        try:
            return self._exchange(Work(grammar, seconds + GRACE_SECONDS), seconds, look)
        except TimeoutError:
            text = f"compiling this grammar takes longer than the {seconds:g} s that it may; make it simpler"
            raise WorkerFailed(text, "grammar_timeout", 400) from None
        except (EOFError, OSError):
            self._see_how_it_ended()
            raise WorkerFailed("compiling this grammar ended the process that did it", "grammar_failed", 400) from None

    def kill(self) -> None:
        """End it at once. A thread that waits for its answer learns of it by the end of the pipe."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def dispose(self) -> None:
        """Kill it, take its exit status and close the pipes; no thread may be using them."""
        self.kill()
        if self._process is not None:
            with self._process:
                pass

    def _see_how_it_ended(self) -> None:
        """Raise where its end was neither the grammar's fault nor its own."""
        if self._killed:
            raise _closing()
        assert self._process is not None
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return  # it has closed its pipe and goes on
        if not ended_itself(code):
            raise HelperLost(f"it was killed by signal {-code}")

    def _exchange(self, message: Start | Work, seconds: float, look: Callable[[float], None] | None = None) -> Reply:
        self._watch = Watch(self.pid, seconds, look)
        self._frames.send(message)
        data = self._frames.receive()
        if not data:
            raise EOFError
        return msgspec.msgpack.decode(data, type=Reply)

    def _read(self, count: int) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._watch is not None
        if count > MAX_REPLY:
            raise EOFError
        file = self._process.stdout.fileno()
        self._watch.wait(file, select.POLLIN)
        return os.read(file, min(count, 1 << 20))

    def _write(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._watch is not None
        file = self._process.stdin.fileno()
        view = memoryview(data)
        while view:
            self._watch.wait(file, select.POLLOUT)
            try:
                view = view[os.write(file, view) :]
            except BlockingIOError:
                continue


def _closing() -> WorkerFailed:
    return WorkerFailed("the engine is closing", "shutting_down", 503)
