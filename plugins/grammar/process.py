"""The helper processes that compile grammars, as the threads see them that wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pegboard.plugins.grammar.worker import Reply, Start, Work
from pegboard.toolkit.system.helper_child import HelperChild, HelperEnded

if TYPE_CHECKING:
    from pegboard.core.interfaces.sampling import Grammar
    from pegboard.toolkit.system.helper_child import Look

MODULE = "pegboard.plugins.grammar.worker"
START_SECONDS = 120.0
"""What a worker gets for importing its libraries and reading the tokenizer."""
GRACE_SECONDS = 3.0
"""After the time limit a worker is killed; this much later it would have ended by itself."""
MAX_REPLY = 512 * 2**20


class WorkerFailed(Exception):
    """A worker failed at a grammar, or could not start. `code` as of an InvalidRequest; `status` likewise."""

    def __init__(self, message: str, code: str, status: int) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


def new_worker() -> HelperChild:
    """Start a process; `get_ready` is to follow."""
    return HelperChild(MODULE, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")


def get_ready(worker: HelperChild, start: Start) -> None:
    """Tell a new worker what it is to be. Raises WorkerFailed where it does not get ready, and HelperLost."""
    try:
        reply = _ask(worker, start, START_SECONDS)
    except TimeoutError:
        raise WorkerFailed("the grammar worker did not get ready", "grammar_worker_failed", 500) from None
    except HelperEnded:
        raise WorkerFailed("the grammar worker ended while it started", "grammar_worker_failed", 500) from None
    if reply.error:
        raise WorkerFailed(f"the grammar worker cannot start: {reply.error}", "grammar_worker_failed", 500)


def compile_in(worker: HelperChild, grammar: Grammar, seconds: float, look: Look) -> Reply:
    """Compile a grammar. Raises WorkerFailed where time is up or the grammar ends the process, HelperLost, and what
    `look` raises.
    """
    try:
        return _ask(worker, Work(grammar, seconds + GRACE_SECONDS), seconds, look)
    except TimeoutError:
        text = f"compiling this grammar takes longer than the {seconds:g} s that it may; make it simpler"
        raise WorkerFailed(text, "grammar_timeout", 400) from None
    except HelperEnded:
        raise WorkerFailed("compiling this grammar ended the process that did it", "grammar_failed", 400) from None


def _ask(worker: HelperChild, message: Start | Work, seconds: float, look: Look | None = None) -> Reply:
    data = worker.ask(msgspec.msgpack.encode(message), seconds, look, most=MAX_REPLY)
    try:
        return msgspec.msgpack.decode(data, type=Reply)
    except msgspec.MsgspecError:
        raise HelperEnded(None) from None
