"""Draft trees in numpy. Trees of several requests are packed one after the other, see DraftTrees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.speculator import MAX_NODES, Accepted, DraftTrees

Int64s = NDArray[np.int64]


def chains(drafts: Iterable[tuple[int, Sequence[int] | Int64s]]) -> DraftTrees:
    """Return a chain for each (newest token, drafted tokens)."""
    pairs = [(root, np.asarray(drafted, np.int64)) for root, drafted in drafts]
    counts = np.fromiter((1 + drafted.shape[0] for _, drafted in pairs), np.int64, len(pairs))
    parts = [part for root, drafted in pairs for part in (np.array([root], np.int64), drafted)]
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return DraftTrees(counts, tokens, places(counts) - 1)


def join(trees: Iterable[DraftTrees]) -> DraftTrees:
    """Return the trees of all of them, in order."""
    found = list(trees)
    none = np.empty(0, np.int64)
    return DraftTrees(
        np.concatenate([none, *(one.counts for one in found)]),
        np.concatenate([none, *(one.tokens for one in found)]),
        np.concatenate([none, *(one.parents for one in found)]),
    )


def starts(counts: Int64s) -> Int64s:
    """Return where each request's part of packed values begins."""
    return np.cumsum(counts) - counts


def places(counts: Int64s) -> Int64s:
    """Return each packed value's index within its request's part."""
    total = int(counts.sum())
    return np.arange(total) - np.repeat(starts(counts), counts)


def depths(trees: DraftTrees) -> Int64s:
    """Return int64 [nodes]: how many tokens precede each node in its tree; 0 for a root."""
    found = np.zeros(trees.tokens.shape[0], np.int64)
    if is_chain(trees):
        return places(trees.counts)
    above = np.repeat(starts(trees.counts), trees.counts) + trees.parents
    for node, parent in enumerate(trees.parents.tolist()):
        if parent >= 0:
            found[node] = found[above[node]] + 1
    return found


def is_chain(trees: DraftTrees) -> bool:
    """Return whether no tree has a branch: each node follows the one before it."""
    return bool((trees.parents == places(trees.counts) - 1).all())


def tail_bits(trees: DraftTrees) -> Int64s:
    """Return int64 [nodes]: bit i of a node is set where node i of its tree is an ancestor of it, or itself."""
    found = (np.uint64(1) << places(trees.counts).astype(np.uint64)).tolist()
    above = (np.repeat(starts(trees.counts), trees.counts) + trees.parents).tolist()
    for node, parent in enumerate(trees.parents.tolist()):
        if parent >= 0:
            found[node] |= found[above[node]]
    return np.array(found, np.uint64).view(np.int64)


def path(trees: DraftTrees, node: int) -> list[int]:
    """Return the packed nodes from the root of a packed node's tree down to it."""
    start = int(starts(trees.counts)[np.searchsorted(np.cumsum(trees.counts), node, "right")])
    found = [node]
    while (parent := int(trees.parents[found[-1]])) >= 0:
        found.append(start + parent)
    return found[::-1]


def walk(trees: DraftTrees, drawn: Int64s) -> Accepted:
    """Go down each tree as long as the token drawn at a node, `drawn` int64 [nodes], is that of one of its children."""
    counts: list[int] = []
    nodes: list[int] = []
    start = 0
    tokens, parents, found = trees.tokens.tolist(), trees.parents.tolist(), drawn.tolist()
    for count in trees.counts.tolist():
        at, before = 0, len(nodes)
        nodes.append(start)
        for node in range(1, count):
            # Siblings are distinct and come after their parent, so one pass finds the whole path.
            if parents[start + node] == at and tokens[start + node] == found[start + at]:
                at = node
                nodes.append(start + node)
        counts.append(len(nodes) - before)
        start += count
    taken = np.array(nodes, np.int64)
    return Accepted(np.array(counts, np.int64), taken, drawn[taken])


def cut(trees: DraftTrees, keep: NDArray[np.bool_]) -> DraftTrees:
    """Leave out the nodes whose entry of `keep` bool [nodes] is False, and all below them. Roots must be kept."""
    stays = keep.copy()
    above = np.repeat(starts(trees.counts), trees.counts) + trees.parents
    for node in np.flatnonzero(trees.parents >= 0).tolist():
        stays[node] = stays[node] and stays[above[node]]
    if stays.all():
        return trees
    owner = np.repeat(np.arange(len(trees)), trees.counts)
    counts = np.bincount(owner[stays], minlength=len(trees)).astype(np.int64)
    new = np.cumsum(stays) - 1  # packed place of each node that stays
    moved = np.where(trees.parents >= 0, new[above] - starts(counts)[owner], -1)
    return DraftTrees(counts, trees.tokens[stays], moved[stays])


def take_part(trees: DraftTrees, requests: Int64s) -> DraftTrees:
    """Return the trees of some requests alone, by their indices."""
    counts = trees.counts[requests]
    nodes = np.repeat(starts(trees.counts)[requests], counts) + places(counts)
    return DraftTrees(counts, trees.tokens[nodes], trees.parents[nodes])


def fault(trees: DraftTrees, roots: Int64s, most: Int64s, vocab_size: int) -> str | None:
    """Return what is wrong with the trees of rows with these newest tokens `roots` and bounds `most` int64 [rows]; None
    where they are well formed.
    """
    given: tuple[Any, ...] = (trees.counts, trees.tokens, trees.parents)
    if not all(isinstance(one, np.ndarray) and one.dtype == np.int64 and one.ndim == 1 for one in given):
        return "counts, tokens and parents are not int64 arrays of one dimension"
    counts, tokens, parents = trees.counts, trees.tokens, trees.parents
    if counts.shape != roots.shape:
        return f"{counts.shape[0]} trees for {roots.shape[0]} rows"
    if ((counts < 1) | (counts > np.minimum(most, MAX_NODES))).any():
        return f"trees of {counts.tolist()} nodes, where 1 to {most.tolist()} are allowed"
    if tokens.shape[0] != counts.sum() or parents.shape != tokens.shape:
        return f"{tokens.shape[0]} tokens and {parents.shape[0]} parents for {int(counts.sum())} nodes"
    own = places(counts)
    if ((parents < 0) != (own == 0)).any() or (parents >= own).any() or (parents < -1).any():
        return "a parent does not come before its child"
    if (tokens[own == 0] != roots).any():
        return "a root is not the newest token of its row"
    if tokens.shape[0] and (tokens.min() < 0 or tokens.max() >= vocab_size):
        return f"a token is none of the vocabulary's {vocab_size}"
    if not is_chain(trees):
        owner = np.repeat(np.arange(len(trees)), counts)
        known = np.unique(np.stack([owner, parents, tokens]), axis=1)
        if known.shape[1] != tokens.shape[0]:
            return "siblings have the same token"
    return None
