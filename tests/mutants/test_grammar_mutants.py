"""Broken grammar backends, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import Grammar
from pegboard.plugins.grammar.api import CompiledGrammar, GrammarMatcher
from pegboard.plugins.grammar.suite import GrammarContract
from pegboard.plugins.grammar.suite.cases import EOS
from pegboard.plugins.grammar_llguidance.backend import LLGuidanceBackend
from pegboard.toolkit.grammars.grammar import parts_of

pytestmark = pytest.mark.full

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Wrapped(GrammarMatcher):
    """Passes everything on."""

    def __init__(self, inner: GrammarMatcher) -> None:
        self.inner = inner

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        return self.inner.fill(mask, row)

    def accept(self, token: int) -> bool:
        return self.inner.accept(token)

    def rollback(self, count: int) -> None:
        self.inner.rollback(count)

    @property
    def terminated(self) -> bool:
        return self.inner.terminated

    def forced(self) -> Sequence[int]:
        return self.inner.forced()


class WrappedGrammar(CompiledGrammar):
    def __init__(self, inner: CompiledGrammar, wrap: Callable[[GrammarMatcher], GrammarMatcher]) -> None:
        self.inner = inner
        self.wrap = wrap

    @property
    def size_bytes(self) -> int:
        return self.inner.size_bytes

    def matcher(self) -> GrammarMatcher:
        return self.wrap(self.inner.matcher())


class Wrapping(LLGuidanceBackend):
    """The real backend, its matchers in a wrapper."""

    wrapper: type[Wrapped] = Wrapped

    def load(self, grammar: Grammar, compiled: bytes) -> CompiledGrammar:
        return WrappedGrammar(super().load(grammar, compiled), self.wrapper)


def wrapping(wrapper: type[Wrapped]) -> type[Wrapping]:
    """A backend with this wrapper, by its name."""
    return type(wrapper.__name__, (Wrapping,), {"wrapper": wrapper})


class AllowsEverything(Wrapped):
    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        self.inner.fill(mask, row)
        mask[row] = -1
        return True


class AddsToTheMask(Wrapped):
    """Relies on the row being zero."""

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        fresh = np.zeros_like(mask)
        self.inner.fill(fresh, row)
        mask[row] |= fresh[row]
        return True


class FillsTheFirstRow(Wrapped):
    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        return self.inner.fill(mask, row) and self.inner.fill(mask, 0)


class ForgetsTheEnd(Wrapped):
    """The token that ends an output is never in the mask where something else may come as well."""

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        filled = self.inner.fill(mask, row)
        if (mask[row] & ~np.int32(1 << EOS)).any() or (mask[row, 1:]).any():
            mask[row, 0] &= ~np.int32(1 << EOS)
        return filled


class AllowsTheEndAnywhere(Wrapped):
    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        filled = self.inner.fill(mask, row)
        mask[row, 0] |= np.int32(1 << EOS)
        return filled


class AllowsASpecialToken(Wrapped):
    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        filled = self.inner.fill(mask, row)
        mask[row, 0] |= np.int32(1 << 1)
        return filled


class AllowsPadding(Wrapped):
    """Tokens beyond the tokenizer's, which the logits have."""

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        filled = self.inner.fill(mask, row)
        mask[row, -1] = -1
        return filled


class AcceptsAnything(Wrapped):
    def accept(self, token: int) -> bool:
        self.inner.accept(token)
        return True


class AcceptsTheEndTwice(Wrapped):
    def accept(self, token: int) -> bool:
        return self.inner.accept(token) or (token == EOS and self.inner.terminated)


class MovesWhenItRefuses(Wrapped):
    """A refused token takes the one before it back."""

    taken = 0

    def accept(self, token: int) -> bool:
        accepted = self.inner.accept(token)
        self.taken += accepted
        if not accepted and self.taken:
            self.inner.rollback(1)
            self.taken -= 1
        return accepted


class MovesWhenItFills(Wrapped):
    """Takes what is forced, when it is asked for a mask."""

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        filled = self.inner.fill(mask, row)
        for token in self.inner.forced()[:1]:
            self.inner.accept(token)
        return filled


class TerminatesLate(Wrapped):
    """Only once the token that ends has come."""

    ended = False

    def accept(self, token: int) -> bool:
        accepted = self.inner.accept(token)
        self.ended = self.ended or (accepted and token == EOS)
        return accepted

    @property
    def terminated(self) -> bool:
        return self.ended


class TerminatesWhereItMayEnd(Wrapped):
    @property
    def terminated(self) -> bool:
        mask = np.zeros((1, 11), np.int32)
        self.inner.fill(mask, 0)
        return self.inner.terminated or bool(mask[0, 0] >> EOS & 1)


class RollsOneTooFewBack(Wrapped):
    def rollback(self, count: int) -> None:
        self.inner.rollback(count - 1 if count > 1 else count)


class ForgetsTheEndWhenRollingBack(Wrapped):
    """The token that ended it counts for nothing."""

    ended = False

    def accept(self, token: int) -> bool:
        accepted = self.inner.accept(token)
        self.ended = self.ended or (accepted and token == EOS)
        return accepted

    def rollback(self, count: int) -> None:
        if count:
            self.inner.rollback(count + self.ended)
            self.ended = False


class ForcesTheFirstChoice(Wrapped):
    """Whatever has the lowest number is said to be forced."""

    def forced(self) -> Sequence[int]:
        mask = np.zeros((1, 11), np.int32)
        if self.inner.terminated or not self.inner.fill(mask, 0):
            return ()
        allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))
        return [int(token) for token in allowed if token > EOS][:1]


class MovesWhenItForces(Wrapped):
    def forced(self) -> Sequence[int]:
        tokens = self.inner.forced()
        for token in tokens:
            self.inner.accept(token)
        return tokens


class NeverForces(Wrapped):
    def forced(self) -> Sequence[int]:
        return ()


class SharesOneMatcher(Wrapping):
    """All outputs of a grammar move the same matcher."""

    def load(self, grammar: Grammar, compiled: bytes) -> CompiledGrammar:
        matcher = super().load(grammar, compiled).matcher()
        return WrappedGrammar(super().load(grammar, compiled), lambda _: matcher)


class KeepsWhatItCompiled(LLGuidanceBackend):
    """The bytes are a key into a table of this instance."""

    def __init__(self, options: Any, ctx: Any) -> None:
        super().__init__(options, ctx)
        self._table: dict[bytes, bytes] = {}

    def compile(self, grammar: Grammar) -> bytes:
        key = str(len(self._table)).encode()
        self._table[key] = super().compile(grammar)
        return key

    def load(self, grammar: Grammar, compiled: bytes) -> CompiledGrammar:
        return super().load(grammar, self._table[compiled])


class SaysNothingOfItsSize(LLGuidanceBackend):
    def load(self, grammar: Grammar, compiled: bytes) -> CompiledGrammar:
        loaded = super().load(grammar, compiled)
        loaded._size = 0  # type: ignore[attr-defined]
        return loaded


class Rewrites(LLGuidanceBackend):
    """Compiles another grammar than the one that it was given."""

    kind = ""

    def rewritten(self, source: str) -> str:
        raise NotImplementedError

    def compile(self, grammar: Grammar) -> bytes:
        if grammar.kind == self.kind:
            grammar = Grammar(grammar.kind, self.rewritten(grammar.source))
        return super().compile(grammar)


class IgnoresBounds(Rewrites):
    kind = "json_schema"

    def rewritten(self, source: str) -> str:
        return source.replace('"maximum"', '"title"').replace(": 20}", ': "x"}')


class ForgetsRequired(Rewrites):
    kind = "json_schema"

    def rewritten(self, source: str) -> str:
        return source.replace('"required"', '"examples"')


class CountsInDoubles(Rewrites):
    kind = "json_schema"

    def rewritten(self, source: str) -> str:
        return re.sub(r"\d{17,}", lambda found: str(int(float(found.group()))), source)


class TakesAnyJson(LLGuidanceBackend):
    def compile(self, grammar: Grammar) -> bytes:
        return super().compile(Grammar("json_schema", "{}") if grammar.kind == "json_object" else grammar)


class SearchesInsteadOfMatching(Rewrites):
    kind = "regex"

    def rewritten(self, source: str) -> str:
        return f"(.|\\n)*({source.strip('^$')})(.|\\n)*"


class DropsTheLastRule(Rewrites):
    """Takes only the beginning of `root`."""

    kind = "ebnf"

    def rewritten(self, source: str) -> str:
        return source.replace("root ::=", 'root ::= "a" |', 1)


class IgnoresTriggers(Rewrites):
    kind = "structural_tag"

    def rewritten(self, source: str) -> str:
        tag = json.loads(source) if source.startswith("{") else None
        if not isinstance(tag, dict) or tag.get("at_least_one") or "separator" in tag:
            return source
        tag["triggers"] = [tag["structures"][0]["begin"], tag["structures"][-1]["begin"]]
        return json.dumps(tag)


class LetsTextBetween(Rewrites):
    """Structures that should stand alone stand in free text."""

    kind = "structural_tag"

    def rewritten(self, source: str) -> str:
        tag = json.loads(source) if source.startswith("{") else None
        if not isinstance(tag, dict) or "separator" not in tag:
            return source
        flags = {key: tag[key] for key in ("at_least_one", "stop_after_first") if key in tag}
        return json.dumps({"structures": tag["structures"], "triggers": ["<f="], **flags})


class TakesTheFirstPart(LLGuidanceBackend):
    def compile(self, grammar: Grammar) -> bytes:
        return super().compile(parts_of(grammar)[0])


class BlamesTheWhole(LLGuidanceBackend):
    def compile(self, grammar: Grammar) -> bytes:
        try:
            return super().compile(grammar)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=grammar.kind) from None


class RaisesOfItsOwn(LLGuidanceBackend):
    def compile(self, grammar: Grammar) -> bytes:
        try:
            return super().compile(grammar)
        except Exception as error:
            raise ValueError(str(error)) from None


def mutant(factory: type, caught_by: str) -> Mutant:
    made = wrapping(factory) if issubclass(factory, Wrapped) else factory
    base = Wrapping if issubclass(made, Wrapping) else LLGuidanceBackend
    return Mutant(made, suite=GrammarContract, caught_by=caught_by, base=base)


MUTANTS = [
    mutant(AllowsEverything, "test_fill_and_accept_agree"),
    mutant(AddsToTheMask, "test_a_row_is_filled_whole_and_no_other_is_touched"),
    mutant(FillsTheFirstRow, "test_a_row_is_filled_whole_and_no_other_is_touched"),
    mutant(ForgetsTheEnd, "test_regex"),
    mutant(AllowsTheEndAnywhere, "test_fill_and_accept_agree"),
    mutant(AllowsASpecialToken, "test_fill_and_accept_agree"),
    mutant(AllowsPadding, "test_fill_and_accept_agree"),
    mutant(AcceptsAnything, "test_fill_and_accept_agree"),
    mutant(AcceptsTheEndTwice, "test_an_output_that_is_complete_is_terminated"),
    mutant(MovesWhenItRefuses, "test_a_refused_token_changes_nothing"),
    mutant(MovesWhenItFills, "test_filling_changes_nothing"),
    mutant(TerminatesLate, "test_an_output_that_is_complete_is_terminated"),
    mutant(TerminatesWhereItMayEnd, "test_an_output_that_is_complete_is_terminated"),
    mutant(RollsOneTooFewBack, "test_rollback"),
    mutant(ForgetsTheEndWhenRollingBack, "test_rollback"),
    mutant(ForcesTheFirstChoice, "test_forced_tokens_are_the_only_way_on"),
    mutant(MovesWhenItForces, "test_forced_tokens_are_the_only_way_on"),
    mutant(NeverForces, "test_forced_tokens_are_the_only_way_on"),
    mutant(SharesOneMatcher, "test_matchers_of_one_grammar_are_independent"),
    mutant(KeepsWhatItCompiled, "test_what_one_instance_compiles_another_loads"),
    mutant(SaysNothingOfItsSize, "test_its_size_is_known"),
    mutant(IgnoresBounds, "test_json_schema"),
    mutant(ForgetsRequired, "test_json_schema"),
    mutant(ForgetsRequired, "test_a_random_answer_is_json"),
    mutant(CountsInDoubles, "test_large_integers_are_exact_or_refused"),
    mutant(TakesAnyJson, "test_json_object"),
    mutant(SearchesInsteadOfMatching, "test_regex"),
    mutant(DropsTheLastRule, "test_ebnf"),
    mutant(IgnoresTriggers, "test_structural_tag"),
    mutant(LetsTextBetween, "test_structural_tag"),
    mutant(TakesTheFirstPart, "test_any_of"),
    mutant(BlamesTheWhole, "test_what_is_wrong_with_a_part_is_said_of_that_part"),
    mutant(RaisesOfItsOwn, "test_what_is_no_grammar_is_refused_by_its_name"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: f"{one}-{one.caught_by}")
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
