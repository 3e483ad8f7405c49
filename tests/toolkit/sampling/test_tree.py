"""Draft trees: packing, walking, cutting, and what is no tree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.properties import properties
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.toolkit.sampling import tree

VOCAB = 4
"""So few that drawn tokens often meet drafts."""


def one_tree(random: np.random.Generator, most: int, vocab: int = VOCAB) -> TokenTrees:
    """Return a tree of any shape with at most `most` nodes; siblings are distinct."""
    parents, tokens = [-1], [int(random.integers(vocab))]
    for _ in range(int(random.integers(most))):
        parent, token = int(random.integers(len(parents))), int(random.integers(vocab))
        if (parent, token) not in zip(parents[1:], tokens[1:], strict=True):
            parents.append(parent)
            tokens.append(token)
    return TokenTrees(np.array([len(parents)], np.int64), np.array(tokens, np.int64), np.array(parents, np.int64))


@st.composite
def forests(draw: st.DrawFn) -> TokenTrees:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    most = draw(st.sampled_from([1, 3, 12, 64]))
    return tree.join(one_tree(random, most) for _ in range(draw(st.integers(0, 4))))


def ancestors(trees: TokenTrees) -> list[set[int]]:
    """Return for each packed node those on its way down from the root, by their index in the own tree."""
    found: list[set[int]] = []
    start = 0
    for count in trees.counts.tolist():
        for node in range(count):
            parent = int(trees.parents[start + node])
            found.append({node} | (found[start + parent] if parent >= 0 else set()))
        start += count
    return found


@properties(150)
@given(forests(), st.integers(0, 2**32))
def test_trees_are_walked_by_what_was_drawn(trees: TokenTrees, seed: int) -> None:
    drawn = np.random.default_rng(seed).integers(VOCAB, size=trees.tokens.shape)
    accepted = tree.walk(trees, drawn)
    start, taken = 0, 0
    for request, count in enumerate(trees.counts.tolist()):
        at, way = 0, [start]
        while True:
            children = [
                node
                for node in range(1, count)
                if trees.parents[start + node] == at and trees.tokens[start + node] == drawn[start + at]
            ]
            if not children:
                break
            (at,) = children
            way.append(start + at)
        gained = int(accepted.counts[request])
        assert accepted.nodes[taken : taken + gained].tolist() == way == tree.path(trees, start + at)
        assert accepted.tokens[taken : taken + gained].tolist() == drawn[way].tolist()
        start, taken = start + count, taken + gained
    assert taken == accepted.nodes.shape[0]


@properties(100)
@given(forests())
def test_depths_and_bits_say_who_comes_before(trees: TokenTrees) -> None:
    before = ancestors(trees)
    assert tree.depths(trees).tolist() == [len(one) - 1 for one in before]
    bits = tree.tail_bits(trees).view(np.uint64).tolist()
    assert [{place for place in range(64) if one >> place & 1} for one in bits] == before
    assert tree.is_chain(trees) == all(one == set(range(len(one))) for one in before)


@properties(100)
@given(forests(), st.integers(0, 2**32))
def test_a_node_that_is_cut_takes_all_below_it_with_it(trees: TokenTrees, seed: int) -> None:
    keep = np.random.default_rng(seed).random(trees.tokens.shape) < 0.7
    keep[trees.parents < 0] = True
    firsts = np.repeat(tree.starts(trees.counts), trees.counts)
    stays = [
        all(keep[first + one] for one in way) for first, way in zip(firsts.tolist(), ancestors(trees), strict=True)
    ]
    found = tree.cut(trees, keep)
    assert found.tokens.tolist() == trees.tokens[stays].tolist()
    paths = [[int(trees.tokens[node]) for node in tree.path(trees, at)] for at in np.flatnonzero(stays).tolist()]
    assert [[int(found.tokens[n]) for n in tree.path(found, at)] for at in range(len(found.tokens))] == paths
    assert found.counts.sum() == sum(stays)


@properties(60)
@given(forests(), st.data())
def test_parts_of_joined_trees(trees: TokenTrees, data: st.DataObject) -> None:
    which = np.array(
        data.draw(st.lists(st.integers(0, max(0, len(trees) - 1)), max_size=4 * bool(len(trees)))), np.int64
    )
    part = tree.take_part(trees, which)
    alone = tree.join(tree.take_part(trees, np.array([one], np.int64)) for one in which.tolist())
    assert part.counts.tolist() == alone.counts.tolist() == trees.counts[which].tolist()
    assert part.tokens.tolist() == alone.tokens.tolist()
    assert part.parents.tolist() == alone.parents.tolist()


def test_chains_are_packed() -> None:
    found = tree.chains([(5, [6, 7]), (1, ())])
    assert found.counts.tolist() == [3, 1]
    assert found.tokens.tolist() == [5, 6, 7, 1]
    assert found.parents.tolist() == [-1, 0, 1, -1]
    assert len(tree.chains([])) == 0


GOOD = TokenTrees(*(np.array(one, np.int64) for one in ([4, 1], [1, 2, 3, 3, 0], [-1, 0, 0, 1, -1])))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"counts": [4]}, "1 trees for 2 rows"),
        ({"counts": [5, 0]}, "trees of"),
        ({"counts": [1, 4]}, "trees of"),
        ({"counts": [3, 1]}, "5 tokens"),
        ({"parents": [-1, 0, 0, -1, -1]}, "a parent"),
        ({"parents": [-1, 0, 3, 0, -1]}, "a parent"),
        ({"parents": [0, 0, 0, 1, -1]}, "a parent"),
        ({"parents": [-1, 0, 0, -2, -1]}, "a parent"),
        ({"tokens": [2, 2, 3, 3, 0]}, "a root"),
        ({"tokens": [1, 2, 3, VOCAB, 0]}, "a token"),
        ({"tokens": [1, -2, 3, 3, 0]}, "a token"),
        ({"tokens": [1, 2, 2, 3, 0]}, "siblings"),
    ],
)  # fmt: skip
def test_what_is_no_tree_is_told(changes: dict[str, list[int]], fault: str) -> None:
    roots, most = np.array([1, 0], np.int64), np.array([4, 3], np.int64)
    assert tree.fault(GOOD, roots, most, VOCAB) is None
    bad = replace(GOOD, **{name: np.array(value, np.int64) for name, value in changes.items()})
    assert fault in (tree.fault(bad, roots, most, VOCAB) or "")
    assert "int64" in (tree.fault(replace(GOOD, tokens=GOOD.tokens.astype(np.int32)), roots, most, VOCAB) or "")
