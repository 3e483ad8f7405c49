"""What grammar backends around a library have in common: the model's tokenizer as the library sees it, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.grammar import Grammar, GrammarContext, GrammarKind

V = TypeVar("V")


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
