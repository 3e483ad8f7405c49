"""Choosing a tree from candidates, as EAGLE-2 does (Li et al. 2024). Numpy, on the host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.trees import TokenTrees

Int64s = NDArray[np.int64]


def best_tree(root: int, tokens: Int64s, parents: Int64s, scores: NDArray[np.float32], nodes: int) -> TokenTrees:
    """Return the tree of `root` and the `nodes` - 1 best of its candidates.

    `tokens`, `parents` and `scores` [candidates]: a candidate's parent is one before it, or -1 for the root, and its
    score at most its parent's. Of equal scores the first one counts, so that a parent is chosen before its children.
    The nodes stand in the order of the candidates.
    """
    best = np.sort(np.argsort(-scores, kind="stable")[: nodes - 1])
    place = np.zeros(len(tokens) + 1, np.int64)
    place[best] = np.arange(1, len(best) + 1)  # the last entry, which -1 leads to, is the root's
    found = np.concatenate([[-1], place[parents[best]]])
    return TokenTrees(np.array([1 + len(best)], np.int64), np.concatenate([[root], tokens[best]]), found)
