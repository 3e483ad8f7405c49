"""What tokens see in the tail of a request, written out from the words of ForwardBatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Tree = Sequence[int]
"""The parent of each node, -1 for the root; () is a request without a tail."""


def tree_bits(tree: Tree) -> list[int]:
    """Return the bits of each node: those of its ancestors and its own, not signed."""
    bits: list[int] = []
    for node, parent in enumerate(tree):
        bits.append(1 << node | (bits[parent] if parent >= 0 else 0))
    return bits


def as_int64(bits: Sequence[int]) -> NDArray[np.int64]:
    return np.array(bits, np.uint64).view(np.int64)


def depths(tree: Tree) -> list[int]:
    """Return how many nodes precede each node of a tree on its path."""
    return [bits.bit_count() - 1 for bits in tree_bits(tree)]


def path(tree: Tree, node: int) -> list[int]:
    """Return the nodes from the root down to a node."""
    above = path(tree, tree[node]) if tree[node] >= 0 else []
    return [*above, node]


def seen_keys(length: int, tail: int, bits: int, first_seen: Callable[[int], int]) -> list[int]:
    """Return the keys that a token with these bits sees, of `length` keys whose last `tail` are the tail, by the
    `first_seen` of its layer.
    """
    start = length - tail
    own = [start + index for index in range(tail) if bits >> index & 1]
    # Keys before the tail stand at their own places, those of the tail that it sees one after the other.
    places = [*((key, key) for key in range(start)), *((key, start + rank) for rank, key in enumerate(own))]
    place = start + len(own) - 1
    first = first_seen(place)
    return [key for key, at in places if at >= first]
