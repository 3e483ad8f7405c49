"""Broken token constraints, each caught by the test of the suite that is meant for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest

from pegboard.conformance import token_constraint
from pegboard.core.interfaces.constraint import LATER, Later, NodeMasks, TokenConstraint
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.status import FinishReason
from tests.plugins.grammar import test_constraint

if TYPE_CHECKING:
    from numpy.typing import NDArray


Tree = tuple[Sequence[int], Sequence[int]]
Walked: TypeAlias = "tuple[NDArray[np.bool_], NodeMasks]"
Advanced: TypeAlias = FinishReason | Sequence[int] | Later


class Good(TokenConstraint):
    """Passes everything on."""

    def __init__(self, req: Req, inner: TokenConstraint) -> None:
        self.req, self.inner = req, inner

    def room(self, n: int) -> bool:
        return self.inner.room(n)

    def mask(self) -> NDArray[np.int32] | None:
        return self.inner.mask()

    def walk(self, tree: Tree, remaining: int) -> Walked:
        return self.inner.walk(tree, remaining)

    def advance(self, token: int, more: bool) -> Advanced:
        return self.inner.advance(token, more)


class AllowsNothing(Good):
    def mask(self) -> NDArray[np.int32] | None:
        mask = self.inner.mask()
        return None if mask is None else mask * 0


class AllowsTooMuch(Good):
    """A token that it does not take."""

    def mask(self) -> NDArray[np.int32] | None:
        mask = self.inner.mask()
        return None if mask is None else mask | np.int32(1 << 30)


class ForcesAnything(Good):
    def advance(self, token: int, more: bool) -> Advanced:
        found = self.inner.advance(token, more)
        return [1] if found == () and not more and not self.req.single else found


class ForcesBeyondTheLength(Good):
    def advance(self, token: int, more: bool) -> Advanced:
        found = self.inner.advance(token, more)
        return [*found, *[5] * token_constraint.LONGEST] if isinstance(found, list) and found else found


class ForcesForAll(Good):
    """Also where each token is to be drawn in a row of its own."""

    def advance(self, token: int, more: bool) -> Advanced:
        flags, self.req.flags = self.req.flags, 0
        found = self.inner.advance(token, more)
        self.req.flags = flags
        return found


class LooksInBetween(Good):
    def advance(self, token: int, more: bool) -> Advanced:
        found = self.inner.advance(token, more)
        return [token] if more and found == () else found


class ForgetsOne(Good):
    """A token is not gone on by where another one follows."""

    def advance(self, token: int, more: bool) -> Advanced:
        return () if more else self.inner.advance(token, more)


class KeepsAll(Good):
    def walk(self, tree: Tree, remaining: int) -> Walked:
        self.inner.walk(tree, remaining)
        mask = self.mask()
        assert mask is not None
        count = len(tree[0])
        return np.ones(count, np.bool_), NodeMasks(np.tile(mask, (count, 1)), np.zeros(count, np.bool_))


class CutsTheRoot(Good):
    def walk(self, tree: Tree, remaining: int) -> Walked:
        keep, masks = self.inner.walk(tree, remaining)
        return keep & False, masks


class TellsOfCutNodes(Good):
    def walk(self, tree: Tree, remaining: int) -> Walked:
        keep, masks = self.inner.walk(tree, remaining)
        count = len(tree[0]) + 1
        return keep, NodeMasks(np.resize(masks.bits, (count, masks.bits.shape[1])), np.resize(masks.free, count))


class ShowsTheRootsMask(Good):
    def walk(self, tree: Tree, remaining: int) -> Walked:
        keep, masks = self.inner.walk(tree, remaining)
        return keep, NodeMasks(np.tile(masks.bits[:1], (len(masks.bits), 1)), masks.free)


class GoesAlong(Good):
    """It stays at the first node that it keeps."""

    def walk(self, tree: Tree, remaining: int) -> Walked:
        keep, masks = self.inner.walk(tree, remaining)
        for node in np.flatnonzero(keep)[1:2].tolist():
            self.inner.advance(tree[0][node], more=False)
        return keep, masks


class NeverReady(Good):
    def advance(self, token: int, more: bool) -> Advanced:
        return LATER


MUTANTS: list[tuple[type[Good], str, str]] = [
    (AllowsNothing, "test_what_may_come_is_taken", "allows no token at all"),
    (AllowsTooMuch, "test_what_may_come_is_taken", "its mask allows"),
    (NeverReady, "test_what_may_come_is_taken", "still says LATER"),
    (ForcesAnything, "test_it_forces_nothing_that_may_not_come", "fails by it"),
    (ForcesBeyondTheLength, "test_it_forces_nothing_that_may_not_come", "tokens"),
    (ForcesForAll, "test_it_forces_nothing_that_may_not_come", "of a single request"),
    (LooksInBetween, "test_tokens_that_come_together_come_one_by_one", "although the next one is known"),
    (ForgetsOne, "test_tokens_that_come_together_come_one_by_one", "it fails|is another one"),
    (KeepsAll, "test_a_tree_is_cut_to_what_may_come", "which may not come|which ends the output"),
    (CutsTheRoot, "test_a_tree_is_cut_to_what_may_come", "node 0 is always kept"),
    (TellsOfCutNodes, "test_a_tree_is_cut_to_what_may_come", "other nodes than it keeps"),
    (ShowsTheRootsMask, "test_a_tree_is_cut_to_what_may_come", "is not that of a request"),
    (GoesAlong, "test_looking_at_a_tree_changes_nothing", "walk"),
]
TESTS = sorted({test for _, test, _ in MUTANTS})


def run(mutant: type[Good], test: str) -> None:
    class Suite(test_constraint.TestAhead):
        def make(self, req: Req) -> TokenConstraint:
            return mutant(req, super().make(req))

    for seed in token_constraint.SEEDS:
        getattr(Suite(), test)(seed)


@pytest.mark.parametrize("test", TESTS)
def test_the_original_passes(test: str) -> None:
    run(Good, test)


@pytest.mark.parametrize(("mutant", "test", "says"), MUTANTS, ids=lambda one: getattr(one, "__name__", None))
def test_caught(mutant: type[Good], test: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_constraint, "PATIENCE", 0.2 if mutant is NeverReady else 20.0)
    with pytest.raises(AssertionError, match=says):
        run(mutant, test)
