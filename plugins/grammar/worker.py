"""A process that compiles grammars: ``python -m pegboard.plugins.grammar.worker``, started by a GrammarPool.

A grammar comes from any client, and compiling one may crash, eat memory or never end. Here that costs a
process that holds nothing. The first frame says what the process is to be, each one after it brings a grammar; the
process ends by itself when one takes far longer than it may.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
from pathlib import Path

import msgspec
import numpy as np

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar.api import GrammarBackend, GrammarContext
from pegboard.toolkit.grammars.grammar import parts_of
from pegboard.toolkit.grammars.regex_length import check_length
from pegboard.toolkit.system.helper_child import limit, serve

logger = logging.getLogger(__name__)

TRIAL_STEPS = 24


class Start(msgspec.Struct):
    """What a worker is to be. `factory` and `options_model` are lazy names; `memory` is how many bytes it may take
    beyond what it has once it is ready.
    """

    factory: str
    options_model: str
    options: dict[str, object]
    directory: str
    vocab_size: int
    eos_token_ids: list[int]
    memory: int

    @classmethod
    def of(cls, backend: GrammarBackend, memory: int) -> Start:
        """Return what makes workers of a backend: they build it again."""
        options, ctx = backend.options, backend.ctx
        return cls(
            factory=_lazy_name(type(backend)),
            options_model=_lazy_name(type(options)),
            options=options.model_dump(mode="json"),
            directory=str(ctx.directory),
            vocab_size=ctx.vocab_size,
            eos_token_ids=sorted(ctx.eos_token_ids),
            memory=memory,
        )


class Work(msgspec.Struct):
    """A grammar, and the seconds after which certainly no request waits for it any more."""

    grammar: Grammar
    seconds: float


class Reply(msgspec.Struct):
    """What came of it: bytes, or an error for users, with status 0 where the worker itself has failed."""

    compiled: bytes = b""
    error: str = ""
    status: int = 0
    code: str = ""
    param: str = ""


def _lazy_name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def make_backend(start: Start) -> GrammarBackend:
    """Return the backend, from its lazy names and the prepared model's directory."""
    from pegboard.toolkit.system.lazy_names import import_name
    from pegboard.toolkit.text.tokenizer import Tokenizer

    directory = Path(start.directory)
    context = GrammarContext(
        directory, Tokenizer.from_directory(directory), start.vocab_size, frozenset(start.eos_token_ids)
    )
    options = import_name(start.options_model).model_validate(start.options)
    backend: GrammarBackend = import_name(start.factory)(options, context)
    return backend


def compile_safely(backend: GrammarBackend, grammar: Grammar) -> Reply:
    """Return the reply to one grammar, whatever happens short of a crash."""
    try:
        for part in parts_of(grammar):
            if part.kind == "regex":
                check_length(part.source, part.kind)
        compiled = backend.compile(grammar)
        try_out(backend, grammar, compiled)
        return Reply(compiled=compiled)
    except InvalidRequest as error:
        return Reply(error=error.message, status=error.status, code=error.code, param=error.param or grammar.kind)
    except MemoryError:
        text = f"{grammar.kind}: compiling this grammar takes more memory than it may"
        return Reply(error=text, status=400, code="grammar_too_large", param=grammar.kind)
    except RecursionError:
        text = f"{grammar.kind}: this grammar is nested too deeply"
        return Reply(error=text, status=400, code="invalid_grammar", param=grammar.kind)
    except Exception as error:
        logger.exception("compiling a grammar failed")
        text = f"{grammar.kind}: this grammar cannot be compiled: {type(error).__name__}: {error}"
        return Reply(error=text, status=400, code="grammar_failed", param=grammar.kind)


def try_out(backend: GrammarBackend, grammar: Grammar, compiled: bytes) -> None:
    """Take some steps into the grammar, as an output would. What would hang or break the scheduler does so here."""
    matcher = backend.load(grammar, compiled).matcher()
    words = -(-backend.ctx.vocab_size // 32)
    mask = np.zeros((1, words), np.int32)
    for step in range(TRIAL_STEPS):
        matcher.forced()
        if matcher.terminated or not matcher.fill(mask, 0):
            return
        allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))
        allowed = allowed[~np.isin(allowed, list(backend.ctx.eos_token_ids))]
        # Any choice will do, if only it is not the same kind of token each time.
        if not allowed.shape[0] or not matcher.accept(int(allowed[step * 7919 % allowed.shape[0]])):
            return


class _Worker:
    """What answers frames: first a Start, then Work."""

    def __init__(self) -> None:
        self._backend: GrammarBackend | None = None

    def answer(self, data: bytes) -> bytes:
        return msgspec.msgpack.encode(self._start(data) if self._backend is None else self._compile(data))

    def _start(self, data: bytes) -> Reply:
        start = msgspec.msgpack.decode(data, type=Start)
        try:
            self._backend = make_backend(start)
        except Exception as error:
            logger.exception("the grammar worker cannot start")
            return Reply(error=f"{type(error).__name__}: {error}")
        _limit_memory(start.memory)
        return Reply()

    def _compile(self, data: bytes) -> Reply:
        assert self._backend is not None
        work = msgspec.msgpack.decode(data, type=Work)
        # The default action ends the process even where a library never comes back to the interpreter.
        signal.alarm(int(work.seconds) + 1)
        reply = compile_safely(self._backend, work.grammar)
        signal.alarm(0)
        return reply


def _limit_memory(more: int) -> None:
    limits = [(resource.RLIMIT_CORE, 0)]
    # Not on Linux: no limit is better than a wrong one.
    with contextlib.suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        limits.append((resource.RLIMIT_AS, pages * resource.getpagesize() + more))
    limit(limits)


if __name__ == "__main__":
    serve(_Worker().answer)
