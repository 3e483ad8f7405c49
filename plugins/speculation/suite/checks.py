"""What the tests of speculators share: the suite's model, and how trees and calls are looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pegboard.conformance.rig import paged, steps, tails
from pegboard.conformance.rig.steps import StepCounter
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.api import DraftRow
from pegboard.toolkit.sampling import tree

Int64s = NDArray[np.int64]

VOCAB = 97
"""Tokens of the suite's model."""

MOST = 8
"""Most nodes of a tree, where a test says nothing else."""

PlainTree = tuple[list[int], list[int]]
"""A tree's tokens and parents."""


def check(trees: TokenTrees, rows: Sequence[DraftRow]) -> None:
    """Fail where the trees of these rows are ill-formed."""
    __tracebackhide__ = True
    check_trees(trees, [int(row.tokens[-1]) for row in rows], [row.most for row in rows])


def check_trees(trees: TokenTrees, newest: Sequence[int], most: Sequence[int]) -> None:
    """Fail where the trees of requests with these `newest` tokens, and `most` nodes each, are ill-formed."""
    __tracebackhide__ = True
    assert isinstance(trees, TokenTrees), f"the answer must be TokenTrees, found {type(trees).__name__}"
    fault = tree.fault(trees, np.array(newest, np.int64), np.array(most, np.int64), VOCAB)
    assert fault is None, f"the trees are ill-formed: {fault}"


def plain(trees: TokenTrees) -> list[PlainTree]:
    """Return each tree by itself."""
    parts = [tree.take_part(trees, np.array([place])) for place in range(len(trees))]
    return [(part.tokens.tolist(), part.parents.tolist()) for part in parts]


def step_counter(limit: int = 1 << 62) -> StepCounter:
    """Return what counts instructions of Python, in all functions but those that stand in for the engine."""
    return StepCounter(limit, _ENGINE)


def count_steps(propose: Callable[[Sequence[DraftRow]], object], rows: Sequence[DraftRow]) -> int:
    """Return how many instructions of Python a call takes, in all functions but those that stand in for the engine."""
    counter = step_counter()
    with counter.counted():
        propose(rows)
    return counter.count


_ENGINE = {
    *(module.__name__ for module in (paged, tails, steps)),
    *(f"{__package__}.{name}" for name in ("bench", "model", "device_rig", "rig")),
}
