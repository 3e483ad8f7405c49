"""The kit's small speculators in the suite: the mutants are made of them."""

from __future__ import annotations

from pegboard.plugins.speculation.suite import SpeculatorContract
from tests.fakes.speculators import BranchingSumSpeculator, SumSpeculator, TokenSumSpeculator


class TestChains(SpeculatorContract):
    factory = SumSpeculator
    provides = frozenset({"device"})


class TestTrees(SpeculatorContract):
    factory = BranchingSumSpeculator
    provides = frozenset({"device", "branches"})


class TestTokensAlone(SpeculatorContract):
    factory = TokenSumSpeculator
    provides = frozenset({"device"})
