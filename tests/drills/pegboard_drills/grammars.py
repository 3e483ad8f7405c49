"""A grammar backend that does what its grammars say: for tests of code that has to live with one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar.api import CompiledGrammar, GrammarBackend, GrammarContext, GrammarMatcher

if TYPE_CHECKING:
    from numpy.typing import NDArray

EOS = 2


class ScriptedBackend(GrammarBackend):
    """A `regex` is a script. ``tokens 5 6`` is a grammar of just these tokens; the others are drills while compiling:
    ``die`` (the process crashes), ``hang``, ``hang in C`` (holding the interpreter), ``eat`` (memory), ``raise``,
    ``refuse`` and ``print``; ``slow 0.5`` waits before it is a grammar of the token 5 (``slow 0.5 /tmp/begun`` writes
    the process's id there first), ``broken`` cannot be loaded, ``trap fill`` compiles but raises from its matchers, and
    ``trap hang-fill`` hangs in them.
    """

    def compile(self, grammar: Grammar) -> bytes:
        word, _, rest = grammar.source.partition(" ")
        if word == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif word == "hang" and rest:
            # A library that spins without giving the interpreter back: nothing in Python can end it.
            sum(range(10**15))
        elif word == "hang":
            _spin()
        elif word == "eat":
            held = [bytes(64 * 2**20)]
            while True:
                held.append(bytes(64 * 2**20))
        elif word == "raise":
            raise RuntimeError("as asked")
        elif word == "refuse":
            raise InvalidRequest("this grammar is refused, as asked", param=grammar.kind, code="invalid_grammar")
        elif word == "print":
            print("a library that talks on standard output")  # noqa: T201
            os.write(1, b"\0" * 64)
        elif word == "slow":
            seconds, _, begun = rest.partition(" ")
            if begun:
                with Path(begun).open("a", encoding="ascii") as file:
                    file.write(f"{os.getpid()}\n")
            time.sleep(float(seconds))
        return grammar.source.encode()

    def load(self, grammar: Grammar, compiled: bytes) -> CompiledGrammar:
        word, _, rest = compiled.decode().partition(" ")
        if word == "broken":
            raise RuntimeError("it cannot be loaded, as asked")
        tokens = [int(token) for token in rest.split()] if word == "tokens" else [5, 6]
        return ScriptedGrammar(tokens, trap=rest if word == "trap" else "", free=word == "free")


class ScriptedGrammar(CompiledGrammar):
    """Just these tokens, in this order. `trap` names what of a matcher raises; with `free` everything is allowed."""

    def __init__(self, tokens: Sequence[int], *, trap: str = "", free: bool = False, eos: int = EOS) -> None:
        self.tokens = tuple(tokens)
        self.eos = eos
        self.trap = trap
        self.free = free

    @property
    def size_bytes(self) -> int:
        return 1000

    def matcher(self) -> GrammarMatcher:
        if self.trap == "matcher":
            raise RuntimeError("no matcher, as asked")
        return ScriptedMatcher(self)


class ScriptedMatcher(GrammarMatcher):
    """Where one output is in a ScriptedGrammar."""

    def __init__(self, grammar: ScriptedGrammar) -> None:
        self._grammar = grammar
        self.taken: list[int] = []

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        self._hang("fill")
        if self._grammar.trap == "fill" and self.taken:
            raise RuntimeError("no mask, as asked")
        if self._grammar.free:
            return False
        mask[row] = 0
        if self._grammar.trap != "empty" or not self.taken:
            token = self._next()
            mask[row, token // 32] = np.int32(np.uint32(1 << token % 32).view(np.int32))
        return True

    def accept(self, token: int) -> bool:
        self._hang("accept")
        if self._grammar.trap == "accept":
            raise RuntimeError("nothing is accepted, as asked")
        if self.taken[-1:] == [self._grammar.eos] or not (self._grammar.free or token == self._next()):
            return False
        self.taken.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    @property
    def terminated(self) -> bool:
        return self.taken[-1:] == [self._grammar.eos] or (
            not self._grammar.free and len(self.taken) >= len(self._grammar.tokens)
        )

    def forced(self) -> Sequence[int]:
        self._hang("forced")
        return ()

    def _hang(self, where: str) -> None:
        if self._grammar.trap == f"hang-{where}":
            _spin()

    def _next(self) -> int:
        rest = self._grammar.tokens[len(self.taken) :]
        return rest[0] if rest else self._grammar.eos


def _spin() -> None:
    while True:
        pass


def scripted_context(directory: Path, **options: Any) -> GrammarContext:
    """Return a context in a directory with a tiny tokenizer."""
    from pegboard.conformance.checkpoints import VOCAB_SIZE, write_tiny_tokenizer
    from pegboard.toolkit.text.tokenizer import Tokenizer

    write_tiny_tokenizer(directory)
    return GrammarContext(
        directory, Tokenizer.from_directory(directory), options.get("vocab_size", VOCAB_SIZE), frozenset({EOS})
    )
