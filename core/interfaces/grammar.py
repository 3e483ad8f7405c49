"""Contract: constraining an output to a grammar."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal

import msgspec

from pegboard.core.interfaces.options import OptionsT

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.tokenizer import Tokenizer

GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag", "any_of"]


class Grammar(msgspec.Struct, frozen=True):
    """What an output must look like. Hashable: equal grammars are compiled once.

    `source` is the JSON text of a schema or of a structural tag, a regular expression, or an EBNF grammar whose start
    rule is `root`; "" for `json_object`, which is any JSON object. A structural tag is JSON of the form
    ``{"structures": [{"begin": str, "schema": {...}, "end": str}], "triggers": [str], "at_least_one": bool,
    "stop_after_first": bool}``: free text in which, from a trigger on, one of the structures has to follow. Both flags
    are false by default. With `at_least_one` the output begins with a structure, without a trigger; with
    `stop_after_first` it ends after one. With a `separator` (str) in place of triggers there is no free text: the
    structures follow each other with the separator between them, all of it after `begin` and before `end` ("" each
    unless given), and then the output ends; with `trailing_separator` (bool) one may stand after the last one, too, so
    that a model that has begun to go on may still end. EBNF is GBNF as `pegboard.toolkit.grammars.gbnf` reads it.

    `any_of` is what one of several grammars allows; `source` is JSON, ``[{"kind": str, "source": str}, ...]``, of the
    other kinds. What is wrong with one of them is said by its own kind. See
    `pegboard.toolkit.grammars.grammar.any_of`.
    """

    kind: GrammarKind
    source: str = ""


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
