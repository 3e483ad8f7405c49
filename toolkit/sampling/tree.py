"""Draft trees in numpy. Trees of several requests are packed one after the other, see TokenTrees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.trees import MAX_NODES, Accepted, TokenTrees

Int64s = NDArray[np.int64]


def chains(drafts: Iterable[tuple[int, Sequence[int] | Int64s]]) -> TokenTrees:
    """Return a chain for each (newest token, drafted tokens)."""
    counts: list[int] = []
    tokens: list[int] = []
    parents: list[int] = []
    for root, drafted in drafts:
        counts.append(1 + len(drafted))
        tokens.append(root)
        tokens.extend(drafted)
        parents.extend(range(-1, len(drafted)))
    return TokenTrees(np.array(counts, np.int64), np.array(tokens, np.int64), np.array(parents, np.int64))


def join(trees: Iterable[TokenTrees]) -> TokenTrees:
    """Return the trees of all of them, in order."""
    found = list(trees)
    none = np.empty(0, np.int64)
    return TokenTrees(
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


def depths(trees: TokenTrees) -> Int64s:
    """Return int64 [nodes]: how many tokens precede each node in its tree; 0 for a root."""
    found = np.zeros(trees.tokens.shape[0], np.int64)
    if is_chain(trees):
        return places(trees.counts)
    above = np.repeat(starts(trees.counts), trees.counts) + trees.parents
    for node, parent in enumerate(trees.parents.tolist()):
        if parent >= 0:
            found[node] = found[above[node]] + 1
    return found


def is_chain(trees: TokenTrees) -> bool:
    """Return whether no tree has a branch: each node follows the one before it."""
    return bool((trees.parents == places(trees.counts) - 1).all())


def tail_bits(trees: TokenTrees) -> Int64s:
    """Return int64 [nodes]: bit i of a node is set where node i of its tree is an ancestor of it, or itself."""
    found = (np.uint64(1) << places(trees.counts).astype(np.uint64)).tolist()
    above = (np.repeat(starts(trees.counts), trees.counts) + trees.parents).tolist()
    for node, parent in enumerate(trees.parents.tolist()):
        if parent >= 0:
            found[node] |= found[above[node]]
    return np.array(found, np.uint64).view(np.int64)


def path(trees: TokenTrees, node: int) -> list[int]:
    """Return the packed nodes from the root of a packed node's tree down to it."""
    start = int(starts(trees.counts)[np.searchsorted(np.cumsum(trees.counts), node, "right")])
    found = [node]
    while (parent := int(trees.parents[found[-1]])) >= 0:
        found.append(start + parent)
    return found[::-1]


def walk(trees: TokenTrees, drawn: Int64s) -> Accepted:
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


def cut(trees: TokenTrees, keep: NDArray[np.bool_]) -> TokenTrees:
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
    return TokenTrees(counts, trees.tokens[stays], moved[stays])


def first_nodes(trees: TokenTrees, counts: Int64s) -> TokenTrees:
    """Return the first `counts` int64 [requests] nodes of each tree, which are trees: parents come first."""
    if (counts >= trees.counts).all():
        return trees
    keep = places(trees.counts) < np.repeat(counts, trees.counts)
    return TokenTrees(np.minimum(counts, trees.counts), trees.tokens[keep], trees.parents[keep])


def take_part(trees: TokenTrees, requests: Int64s) -> TokenTrees:
    """Return the trees of some requests alone, by their indices."""
    counts = trees.counts[requests]
    nodes = np.repeat(starts(trees.counts)[requests], counts) + places(counts)
    return TokenTrees(counts, trees.tokens[nodes], trees.parents[nodes])


def fault(trees: TokenTrees, roots: Int64s, most: Int64s, vocab_size: int) -> str | None:
    """Return what is wrong with the trees of rows with these newest tokens `roots` and bounds `most` int64 [rows]; None
    where they are well formed.
    """
    if not _are_int64s(trees.counts, trees.tokens, trees.parents):
        return "counts, tokens and parents are not int64 arrays of one dimension"
    counts, total = trees.counts.tolist(), trees.tokens.shape[0]
    if len(counts) != roots.shape[0]:
        return f"{len(counts)} trees for {roots.shape[0]} rows"
    if any(not 1 <= count <= min(limit, MAX_NODES) for count, limit in zip(counts, most.tolist(), strict=True)):
        return f"trees of {counts} nodes, where 1 to {most.tolist()} are allowed"
    if not total == sum(counts) == trees.parents.shape[0]:
        return f"{total} tokens and {trees.parents.shape[0]} parents for {sum(counts)} nodes"
    if total and not 0 <= trees.tokens.min() <= trees.tokens.max() < vocab_size:
        return f"a token is none of the vocabulary's {vocab_size}"
    # Lists: there are few nodes, and each array operation takes as long as looking at ten of them.
    tokens, parents, start = trees.tokens.tolist(), trees.parents.tolist(), 0
    for count, root in zip(counts, roots.tolist(), strict=True):
        wrong = _fault(tokens[start : start + count], parents[start : start + count], root)
        if wrong is not None:
            return wrong
        start += count
    return None


def _are_int64s(*given: object) -> bool:
    return all(isinstance(one, np.ndarray) and one.dtype == np.int64 and one.ndim == 1 for one in given)


def _fault(tokens: list[int], parents: list[int], root: int) -> str | None:
    """Return what is wrong with one tree."""
    if parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents[1:], start=1)):
        return "a parent does not come before its child"
    if tokens[0] != root:
        return "a root is not the newest token of its row"
    if len(set(zip(parents, tokens, strict=True))) < len(tokens):
        return "siblings have the same token"
    return None


def accepted_fault(trees: TokenTrees, accepted: Accepted, vocab_size: int) -> str | None:
    """Return what is wrong with what is said to stand of trees; None where it is well formed, see Accepted."""
    if not _are_int64s(accepted.counts, accepted.nodes, accepted.tokens):
        return "counts, nodes and tokens are not int64 arrays of one dimension"
    counts, nodes, tokens = accepted.counts.tolist(), accepted.nodes.tolist(), accepted.tokens.tolist()
    if len(counts) != len(trees):
        return f"{len(counts)} counts for {len(trees)} trees"
    if min(counts, default=1) < 1:
        return f"requests gain {counts} tokens, where each gains 1 at least"
    if not sum(counts) == len(nodes) == len(tokens):
        return f"{len(nodes)} nodes and {len(tokens)} tokens for {sum(counts)} that are gained"
    if any(not 0 <= token < vocab_size for token in tokens):
        return f"a token is none of the vocabulary's {vocab_size}"
    parents, drafted, start, at = trees.parents.tolist(), trees.tokens.tolist(), 0, 0
    for size, count in zip(trees.counts.tolist(), counts, strict=True):
        way, said = nodes[at : at + count], tokens[at : at + count]
        if way[0] != start:
            return "the nodes of a request do not begin with its root"
        for above, node, token in zip(way, way[1:], said, strict=False):
            if not start < node < start + size or start + parents[node] != above:
                return "the nodes of a request are not a path of its tree"
            if drafted[node] != token:
                return "a token that is not the last one is not that of the next node"
        start, at = start + size, at + count
    return None
