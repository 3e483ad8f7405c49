"""What the suite of speculators works with: requests of a known future, and the steps that they take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import pytest

from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.api import DraftRow, Speculator, SpeculatorContext
from pegboard.plugins.speculation.suite.checks import MOST, VOCAB, Int64s, check
from pegboard.plugins.speculation.suite.device import DeviceTests
from pegboard.toolkit.sampling import tree


class Life:
    """A request of a known future, as the scheduler carries it on: what it says next, and how far it is."""

    def __init__(self, text: Sequence[int], input_len: int, namespace: str = "") -> None:
        self.text = np.array(text, np.int64)
        self.length = self.input_len = input_len
        self.namespace = namespace
        self.memo: dict[object, object] = {}

    @property
    def done(self) -> bool:
        return self.length >= len(self.text)

    def row(self, most: int = MOST) -> DraftRow:
        """Return the request as it stands, in memory of the row's own, which may not be written to."""
        tokens = self.text[: self.length].copy()
        tokens.setflags(write=False)
        return DraftRow(tokens, self.input_len, self.namespace, most, self.memo)

    def drawn(self, depths: Int64s) -> Int64s:
        """Return what the model says after each node: the future, whatever was drafted."""
        return np.append(self.text, np.full(64, -1))[self.length + depths]


def _plainly(call: str) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


def step(
    speculator: Speculator,
    lives: Sequence[Life],
    mosts: Sequence[int],
    around: Callable[[str], AbstractContextManager[object]] = _plainly,
) -> TokenTrees:
    """Take one step with all of `lives`, as the pipeline does: propose, verify, go on, learn. Return the trees.

    Each call of the speculator is made within `around(its name)`.
    """
    rows = [life.row(most) for life, most in zip(lives, mosts, strict=True)]
    with around("propose"):
        trees = speculator.propose(rows)
    check(trees, rows)
    counts = []
    for place, life in enumerate(lives):
        own = tree.take_part(trees, np.array([place]))
        counts.append(int(tree.walk(own, life.drawn(tree.depths(own))).counts[0]))
        life.length = min(len(life.text), life.length + counts[-1])
    after = [life.row(most) for life, most in zip(lives, mosts, strict=True)]
    with around("learn"):
        speculator.learn(after, trees.counts.copy(), np.array(counts, np.int64))
    return trees


class SpeculatorRig(DeviceTests):
    """What the tests share."""

    @pytest.fixture
    def speculator(self) -> Speculator:
        return self.new()

    def new(self, max_nodes: int = MOST) -> Speculator:
        if "device" in self.capabilities:
            return self.rig(max_nodes)
        spec = ModelSpec("suite", VOCAB, 16, 65536, (), (), frozenset({2}))
        made: Speculator = self.build(SpeculatorContext(spec, max_nodes))
        return made

    def lives(self) -> list[Life]:
        """Return a request for each text, each in a namespace of its own."""
        return [Life(text, prompt, f"tenant {number}") for number, (text, prompt) in enumerate(self.texts())]
