"""GrammarBackend on llguidance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar.api import (
    CompiledGrammar,
    GrammarBackend,
    GrammarContext,
    GrammarMatcher,
    TokenizerViews,
    refused,
)
from pegboard.plugins.grammar_llguidance.options import LLGuidanceOptions
from pegboard.plugins.grammar_llguidance.translate import explain, translate
from pegboard.toolkit.grammars.grammar import parts_of
from pegboard.toolkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray


GRAMMAR_BYTES = 64 * 1024
BYTES_PER_CHAR = 40
"""What a grammar takes in memory, roughly: so much for the beginnings of its lexer, and so much per character."""


class LLGuidanceBackend(GrammarBackend[LLGuidanceOptions]):
    """Grammars become text that llguidance reads within milliseconds; it builds its automata while they are used.

    That work is bounded per step by limits of the library: a matcher that exceeds one fails, and its request with it.
    """

    def __init__(self, options: LLGuidanceOptions, ctx: GrammarContext) -> None:
        super().__init__(options, ctx)
        self._tokenizer = _TOKENIZERS.of(ctx)
        # Character-level grammars take more steps per token than the default allows: see `lark_of`. They are also those
        # whose rules users write themselves, ambiguous ones too.
        self._limits = LLParserLimits(step_max_items=250_000, verbose_errors=False)
        self._rule_limits = LLParserLimits(
            step_max_items=1_000_000, max_items_in_row=options.max_row_items, verbose_errors=False
        )

    @classmethod
    def supports(cls, options: LLGuidanceOptions, ctx: GrammarContext) -> str | None:
        return _TOKENIZERS.problem(ctx)

    def compile(self, grammar: Grammar) -> bytes:
        if grammar.kind == "any_of":
            for one in parts_of(grammar):
                self.compile(one)  # Whatever is wrong with a part is said of that one.
        try:
            text = translate(grammar, max_whitespace=self.options.max_whitespace, lenient=self.options.lenient_schemas)
        except (ValueError, RecursionError) as error:
            raise refused(grammar, str(error)) from None
        wrong, messages = LLMatcher.validate_grammar_with_warnings(
            text, self._tokenizer, limits=self._limits_of(grammar)
        )
        if wrong:
            raise refused(grammar, explain(messages[0]))
        matcher = self._matcher(grammar, text)
        if matcher.is_error():
            raise refused(grammar, explain(matcher.get_error()))
        return text.encode()

    def load(self, grammar: Grammar, compiled: bytes) -> CompiledGrammar:
        matcher = self._matcher(grammar, compiled.decode())
        if matcher.is_error():
            raise RuntimeError(explain(matcher.get_error()))
        size = GRAMMAR_BYTES + BYTES_PER_CHAR * len(compiled)
        return _Compiled(matcher, size, self.ctx.vocab_size, self._tokenizer)

    def _limits_of(self, grammar: Grammar) -> LLParserLimits:
        return self._rule_limits if any(one.kind == "ebnf" for one in parts_of(grammar)) else self._limits

    def _matcher(self, grammar: Grammar, text: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits_of(grammar))


_LIMIT = re.compile(r"Too many items|Current row has \d+ items|(?i:fuel|too many states)")


def _tokenizer(directory: Path, vocab_size: int, eos: tuple[int, ...]) -> LLTokenizer:
    """llguidance's view of the model's tokenizer."""
    tokenizer = Tokenizer.from_directory(directory)
    return LLTokenizer(tokenizer.to_json(), n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=list(eos))


_TOKENIZERS = TokenizerViews("llguidance", _tokenizer)


class _Compiled(CompiledGrammar):
    """A matcher at the beginning, of which every output gets a copy."""

    def __init__(self, matcher: LLMatcher, size: int, vocab_size: int, tokenizer: LLTokenizer) -> None:
        self._matcher = matcher
        self._size = size
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer

    @property
    def size_bytes(self) -> int:
        return self._size

    def matcher(self) -> GrammarMatcher:
        copy, ends = self._matcher.deep_copy(), frozenset(self._tokenizer.eos_tokens)
        if self._tokenizer.vocab_size > self._vocab_size:
            return _NarrowMatcher(copy, ends, self._vocab_size, self._tokenizer.vocab_size)
        return _Matcher(copy, ends)


class _Matcher(GrammarMatcher):
    """The library's matcher, but for the token that ends an output: that one never reaches it."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._taken = 0
        self._ended = False
        self._allowed: NDArray[np.int32] | None = None
        """The mask of this position, once it has been asked for."""

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        words = mask[row]
        if self._ended:
            words[:] = 0
            return True
        # The interpreter is free for other threads meanwhile.
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check()
        self._allowed = words.copy()
        return True

    def accept(self, token: int) -> bool:
        if self._ended:
            return False
        if token in self._ends:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        # Asked first, because a matcher that is given a wrong token never recovers.
        accepted = self._may_come(token) and bool(self._matcher.consume_token(token))
        self._check()
        self._allowed = None
        self._taken += accepted
        return accepted

    def _may_come(self, token: int) -> bool:
        """Return whether the token may come next. Asking the library takes half as long as going on by the token."""
        allowed = self._allowed
        if allowed is not None and 0 <= token < 32 * allowed.shape[0] and int(allowed[token // 32]) >> token % 32 & 1:
            return True
        return bool(self._matcher.validate_tokens([token]))

    def rollback(self, count: int) -> None:
        self._allowed = None
        if count and self._ended:
            self._ended = False
            count -= 1
        if count and not self._matcher.rollback(count):
            raise ValueError(f"cannot take {count} tokens back: {explain(self._matcher.get_error())}")
        self._taken -= count

    @property
    def terminated(self) -> bool:
        if self._ended or self._matcher.is_stopped():
            return True
        # A grammar of the empty text: the library notices that it has stopped when a token comes.
        return not self._taken and bool(self._matcher.is_accepting()) and self._only_the_end()

    def _only_the_end(self) -> bool:
        allowed = np.flatnonzero(np.frombuffer(self._matcher.compute_logit_bias(), np.uint8))
        return set(allowed.tolist()) <= self._ends

    def forced(self) -> Sequence[int]:
        return () if self._ended else self._matcher.compute_ff_tokens()

    def _check(self) -> None:
        if not self._matcher.is_error():
            return
        why = explain(self._matcher.get_error())
        # Some of its limits are internal errors by the library's own account.
        if self._matcher.stop_reason() in ("ParserTooComplex", "LexerTooComplex") or _LIMIT.search(why):
            raise InvalidRequest(f"the grammar is too complex: {why}", code="grammar_too_complex")
        raise RuntimeError(why)


class _NarrowMatcher(_Matcher):
    """Where the tokenizer has tokens beyond the logits' width: its mask is cut off there."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], vocab_size: int, own_vocab_size: int) -> None:
        super().__init__(matcher, ends)
        self._wide = np.zeros((1, -(-own_vocab_size // 32)), np.int32)
        keep = np.full(-(-vocab_size // 32), -1, np.int32)
        if vocab_size % 32:
            keep[-1] = (1 << vocab_size % 32) - 1
        self._keep = keep

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        super().fill(self._wide, 0)
        np.bitwise_and(self._wide[0, : self._keep.shape[0]], self._keep, out=mask[row])
        return True
