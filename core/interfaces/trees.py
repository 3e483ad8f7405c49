"""Tokens ahead: trees of tokens that may follow the newest ones of requests, and what stands of them once computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_NODES = 64
"""Most nodes of a tree: the bits of an int64 say which of them a node follows."""


@dataclass(frozen=True, slots=True)
class TokenTrees:
    """Tokens ahead of several requests, packed: `counts` int64 [requests] says how many nodes each has, `tokens` and
    `parents` are int64 [nodes].

    A tree's first node is its root, the request's newest token. `parents` are indices within the own tree, -1 for the
    root; a parent comes before its children, and siblings have distinct tokens. A tree without branches is a chain, in
    which each node follows the one before. A count of 1 is a request without tokens ahead.
    """

    counts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.counts.shape[0])


@dataclass(frozen=True, slots=True)
class Accepted:
    """What stands of computed trees, packed request after request: `counts` int64 [requests] tokens that each has
    gained, 1 at least; `nodes` int64 [gained] the packed nodes whose logits gave them; `tokens` int64 [gained].

    The nodes of a request are a path from its root. Each token but the last is that of the next node on it.
    """

    counts: NDArray[np.int64]
    nodes: NDArray[np.int64]
    tokens: NDArray[np.int64]
