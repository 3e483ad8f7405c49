"""Contract: constraining an output to a grammar; and what backends around a library have in common."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.options import OptionsT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.sampling import Grammar, GrammarKind
    from pegboard.core.interfaces.tokenizer import Tokenizer

V = TypeVar("V")

NAME = "grammar"
"""Of the plugin, the contract and the stage."""


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """The prepared model's directory and tokenizer. `vocab_size` is the width of the logits, which may exceed the
    tokenizer's own vocabulary: tokens beyond it are never allowed.
    """

    directory: Path
    tokenizer: Tokenizer
    vocab_size: int
    eos_token_ids: frozenset[int]


class GrammarMatcher(abc.ABC):
    """One output's position in a grammar."""

    @abc.abstractmethod
    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        """Write the tokens that may come next into ``mask[row]``, int32 [ceil(vocab / 32)], bit i%32 of word i//32 for
        token i. False where every token may (the row is then undefined). End-of-sequence tokens are set exactly where
        the output may end; other special tokens, and bits beyond the vocabulary, are not. A token of several characters
        may be left out although the grammar allows it, as long as shorter ones can spell the same text.
        """

    @abc.abstractmethod
    def accept(self, token: int) -> bool:
        """Go on by one token. False, with nothing changed, where the grammar does not allow it; what `fill` names is
        allowed. Raises InvalidRequest where the grammar turns out to be too complex.
        """

    @abc.abstractmethod
    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back. Needs the capability `rollback`."""

    @property
    @abc.abstractmethod
    def terminated(self) -> bool:
        """Whether the output is complete and nothing but an end-of-sequence token may follow, or has followed."""

    def forced(self) -> Sequence[int]:
        """Return tokens that must come next, as the tokenizer would write them; empty where there is a choice. Does not
        change the position. Needs the capability `jump_ahead`.
        """
        return ()


class CompiledGrammar(abc.ABC):
    """A grammar ready for use by any number of outputs."""

    @property
    @abc.abstractmethod
    def size_bytes(self) -> int:
        """Memory that it takes, roughly: a cache of compiled grammars is bounded by it."""

    @abc.abstractmethod
    def matcher(self) -> GrammarMatcher:
        """Return a matcher at the beginning."""


class GrammarBackend(abc.ABC, Generic[OptionsT]):
    """Compiles grammars. It runs in two places: in a helper process, where `compile` may take its time, run wild and be
    killed for it, and in the scheduler, where `load` makes of the result what requests use.
    """

    def __init__(self, options: OptionsT, ctx: GrammarContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: GrammarContext) -> str | None:
        """Return None, or the reason why it cannot work with this tokenizer."""
        return None

    @abc.abstractmethod
    def compile(self, grammar: Grammar) -> bytes:
        """Return the compiled grammar, fit to be sent to the scheduler's process. Raises InvalidRequest for a grammar
        that is invalid or that it cannot honour, saying what is wrong with it.
        """

    @abc.abstractmethod
    def load(self, grammar: Grammar, compiled: bytes) -> CompiledGrammar:
        """Return what `compile` made, for use. Fast (milliseconds), and for trusted bytes only."""


class TokenizerViews(Generic[V]):
    """A library's view of a model's tokenizer. The last one is kept: `supports` makes it first, the backend uses it."""

    def __init__(self, library: str, make: Callable[[Path, int, tuple[int, ...]], V]) -> None:
        """`make` gets the model's directory, the width of its logits, and the tokens that end an answer, sorted."""
        self._library = library
        self._make = make
        self._last: tuple[tuple[Path, int, tuple[int, ...]], V] | None = None

    def of(self, ctx: GrammarContext) -> V:
        """Return the view for this model. Raises what the library raises."""
        key = (ctx.directory, ctx.vocab_size, tuple(sorted(ctx.eos_token_ids)))
        if self._last is None or self._last[0] != key:
            self._last = (key, self._make(*key))
        return self._last[1]

    def problem(self, ctx: GrammarContext) -> str | None:
        """Return why the library cannot serve this model, None where it can: the answer of `supports`."""
        if not ctx.eos_token_ids:
            return "the model has no token that ends an answer"
        try:
            self.of(ctx)
        except Exception as error:  # libraries raise plain ones
            return f"{self._library} cannot read the model's tokenizer: {error}"
        return None


def refused(grammar: Grammar | GrammarKind, why: str) -> InvalidRequest:
    """Return the refusal of a grammar that a backend does not take: the kind's field, and why."""
    kind = grammar if isinstance(grammar, str) else grammar.kind
    return InvalidRequest(f"{kind}: {why}", param=kind, code="invalid_grammar")
