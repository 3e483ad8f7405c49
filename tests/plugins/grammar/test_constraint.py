"""The constraint of a request with a grammar, put to the suite of constraints, in all ways in which it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.conformance.token_constraint import TokenConstraintContract
from pegboard.core.interfaces.constraint import TokenConstraint, constraint_of
from pegboard.core.interfaces.req import Req
from pegboard.plugins.grammar.api import CompiledGrammar, GrammarMatcher
from pegboard.plugins.grammar.constraint import Grammars
from pegboard.plugins.grammar.work import GrammarWork, WorkLimits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VOCAB, EOS = 96, 2
TEXTS = ((5, 6, 7, 8), (5, 6, 9), (5, 70, 71, 72, 73, 10), (11, 12, 13), (11, 12, 13, 14, 14, 14, 15))


class Texts(CompiledGrammar):
    """One of some texts."""

    size_bytes = 1

    def __init__(self, texts: Sequence[tuple[int, ...]]) -> None:
        self.texts = texts

    def matcher(self) -> GrammarMatcher:
        return Matcher(self.texts)


class Matcher(GrammarMatcher):
    def __init__(self, texts: Sequence[tuple[int, ...]]) -> None:
        self.texts = texts
        self.taken: list[int] = []

    def following(self) -> set[int]:
        at = len(self.taken)
        fitting = [text for text in self.texts if list(text[:at]) == self.taken]
        return {text[at] if at < len(text) else EOS for text in fitting}

    def fill(self, mask: NDArray[np.int32], row: int) -> bool:
        mask[row] = 0
        for token in self.following():
            mask[row, token // 32] |= 1 << token % 32
        return True

    def accept(self, token: int) -> bool:
        if token not in self.following():
            return False
        self.taken.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self.taken[len(self.taken) - count :]

    @property
    def terminated(self) -> bool:
        return self.taken[-1:] == [EOS] or self.following() == {EOS}

    def forced(self) -> Sequence[int]:
        ahead = Matcher(self.texts)
        ahead.taken = list(self.taken)
        while len(found := ahead.following()) == 1 and found != {EOS}:
            ahead.taken += found
        return ahead.taken[len(self.taken) :]


class Bound(TokenConstraintContract):
    grammars: Grammars

    def make(self, req: Req) -> TokenConstraint:
        self.grammars.begin(req, self.grammars.prepare(Texts(TEXTS)))
        constraint = constraint_of(req)
        assert constraint is not None
        return constraint


def grammars(step_seconds: float, jump_ahead: int) -> Grammars:
    work = GrammarWork(WorkLimits(step_seconds=step_seconds, seconds=100))
    return Grammars(VOCAB, frozenset({EOS}), work, jump_ahead, rolls_back=True)


class TestOneByOne(Bound):
    grammars = grammars(60, 0)


class TestAhead(Bound):
    grammars = grammars(60, 2)


class TestSittingOut(Bound):
    """Every token is a thread's."""

    grammars = grammars(0, 2)
