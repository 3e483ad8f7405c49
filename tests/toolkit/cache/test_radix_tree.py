from __future__ import annotations

import doctest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegboard.toolkit.cache import radix_tree
from pegboard.toolkit.cache.radix_tree import RadixTree, shorten


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def tree_of(page_size: int = 1) -> RadixTree[str]:
    return RadixTree(page_size, make_root=str, split=lambda data, at: (f"{data}[:{at}]", f"{data}[{at}:]"))


def test_the_docs_example() -> None:
    assert doctest.testmod(radix_tree).attempted > 0
    assert doctest.testmod(radix_tree).failed == 0


def test_an_empty_tree_matches_nothing() -> None:
    tree = tree_of()
    path = tree.find(ids(1, 2))
    assert (path.length, path.node, path.whole) == (0, None, True)
    assert tree.roots() == {}


def test_a_miss_makes_no_namespace() -> None:
    tree = tree_of()
    tree.find(ids(1), "a")
    assert tree.insert(ids(), "x", "b") is None
    assert tree.roots() == {}


def test_divergence_splits_and_the_node_stays_the_lower_half() -> None:
    tree = tree_of()
    first = tree.insert(ids(1, 2, 3, 4), "a")
    second = tree.insert(ids(1, 2, 9), "b")
    assert first is not None
    assert second is not None
    upper = first.parent
    assert upper is second.parent
    assert upper is not None
    assert (upper.tokens.tolist(), first.tokens.tolist(), second.tokens.tolist()) == ([1, 2], [3, 4], [9])
    assert (upper.data, first.data, second.data) == ("a[:2]", "a[2:]", "b")
    assert [node.end for node in first.ancestry()] == [4, 2]
    tree.check()


def test_a_path_inside_a_node_is_cut_on_demand() -> None:
    tree = tree_of()
    tree.insert(ids(1, 2, 3, 4), "a")
    path = tree.find(ids(1, 2, 3))
    assert (path.length, path.whole, tree.num_nodes) == (3, False, 1)
    node = tree.cut(path)
    assert node is path.node
    assert node is not None
    assert (path.whole, node.end, node.data, tree.num_nodes) == (True, 3, "a[:3]", 2)
    assert tree.cut(path) is node
    tree.check()


def test_only_whole_pages_count() -> None:
    tree = tree_of(4)
    tree.insert(ids(1, 2, 3, 4, 5, 6, 7), "a")
    assert tree.num_tokens == 4
    tree.insert(ids(1, 2, 3, 4, 5, 6, 7, 8, 9), "b")
    assert tree.find(ids(1, 2, 3, 4, 5, 6, 7, 0)).length == 4
    assert tree.find(ids(1, 2, 3)).length == 0
    assert tree.find(ids(1, 2, 3, 4, 5, 6, 7, 8)).length == 8
    tree.check()


def test_namespaces_share_nothing() -> None:
    tree = tree_of()
    tree.insert(ids(1, 2), "a", "one")
    assert tree.find(ids(1, 2), "two").length == 0
    assert tree.find(ids(1, 2)).length == 0
    assert tree.find(ids(1, 2), "one").length == 2


def test_tokens_are_copied_in() -> None:
    tree = tree_of()
    tokens = ids(1, 2, 3)
    tree.insert(tokens, "a")
    tokens[:] = 7
    assert tree.find(ids(1, 2, 3)).length == 3


def test_other_integer_types_and_strides_are_understood() -> None:
    tree = tree_of(2)
    tree.insert(np.array([1, 2, 3, 4], dtype=np.int32), "a")
    strided = np.array([1, 0, 2, 0, 3, 0, 4, 0], dtype=np.int64)[::2]
    assert tree.find(strided).length == 4


def test_extend_refuses_what_a_path_does_not_fit() -> None:
    tree = tree_of()
    empty = tree.find(ids(1))
    with pytest.raises(ValueError, match="no whole page"):
        tree.extend(empty, ids(), "x")
    tree.insert(ids(1, 2), "a")
    with pytest.raises(ValueError, match="find their path first"):
        tree.extend(empty, ids(1, 5), "b")
    tree.check()


def test_removing_leaves_forgets_an_empty_namespace() -> None:
    tree = tree_of()
    first, second = tree.insert(ids(1, 2), "a", "n"), tree.insert(ids(1, 3), "b", "n")
    assert first is not None
    assert second is not None
    parent = first.parent
    assert parent is not None
    with pytest.raises(ValueError, match="not a leaf"):
        tree.remove(parent)
    tree.remove(first)
    assert not first.attached
    with pytest.raises(ValueError, match="not a leaf"):
        tree.remove(first)
    tree.check()
    tree.remove(second)
    assert not parent.children
    tree.remove(parent)
    assert (tree.roots(), tree.num_nodes, tree.num_tokens) == ({}, 0, 0)


def test_trimming_a_leaf() -> None:
    tree = tree_of(2)
    leaf = tree.insert(ids(1, 2, 3, 4, 5, 6), "a")
    assert leaf is not None
    tree.trim(leaf, 2)
    assert (leaf.end, tree.num_tokens) == (4, 4)
    assert tree.find(ids(1, 2, 3, 4, 5, 6)).length == 4
    for count in (0, 1, 4, 6):
        with pytest.raises(ValueError, match="cannot trim"):
            tree.trim(leaf, count)
    tree.check()


def test_shorten_keeps_no_large_array_alive() -> None:
    array = np.arange(100)
    assert shorten(array, 60).base is array
    assert shorten(shorten(array, 60), 49).base is None


def test_clear_detaches() -> None:
    tree = tree_of()
    node = tree.insert(ids(1, 2), "a")
    assert node is not None
    tree.clear()
    assert not node.attached
    assert tree.num_tokens == 0
    tree.check()


@pytest.mark.parametrize("at", [0, 1, 2, 4, 6])
def test_a_split_needs_a_page_border_inside(at: int) -> None:
    tree = tree_of(4)
    node = tree.insert(ids(1, 2, 3, 4), "a")
    assert node is not None
    with pytest.raises(ValueError, match="cannot split"):
        tree.split(node, at)


def test_a_search_goes_on_from_a_node() -> None:
    tree = tree_of(2)
    tree.insert(ids(1, 2, 3, 4, 5, 6), "a")
    after = tree.insert(ids(1, 2, 9, 9), "b")
    assert after is not None
    tree.insert(ids(1, 2, 9, 9, 7, 7, 8, 8), "c")
    for tokens, length, nodes in (
        (ids(1, 2, 9, 9), 4, [[9, 9]]),
        (ids(1, 2, 9, 9, 5, 6), 4, [[9, 9]]),
        (ids(1, 2, 9, 9, 7, 7, 8, 9), 6, [[9, 9], [7, 7, 8, 8]]),
    ):
        path = tree.find(tokens, "", after)
        assert (path.length, [node.tokens.tolist() for node in path.nodes]) == (length, nodes)
    with pytest.raises(ValueError, match="do not lead to"):
        tree.find(ids(1, 2, 9), "", after)
    leaf = tree.extend(tree.find(ids(1, 2, 9, 9, 5, 6), "", after), ids(1, 2, 9, 9, 5, 6), "d")
    assert leaf.parent is after
    tree.check()


def test_check_finds_a_wrong_count() -> None:
    tree = tree_of()
    tree.insert(ids(1, 2), "a")
    tree.num_tokens += 1
    with pytest.raises(AssertionError, match="2 tokens, but 3 counted"):
        tree.check()


SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([1, 2, 4]), SEQUENCES, SEQUENCES)
def test_it_finds_what_a_set_of_prefixes_finds(page: int, stored: list[list[int]], asked: list[list[int]]) -> None:
    tree = tree_of(page)
    known: set[tuple[int, ...]] = {()}
    for sequence in stored:
        tree.insert(ids(*sequence), "x")
        known |= {tuple(sequence[:n]) for n in range(page, len(sequence) + 1, page)}
        tree.check()
    assert tree.num_tokens == page * (len(known) - 1)
    for sequence in asked:
        longest = max(n for n in range(0, len(sequence) + 1, page) if tuple(sequence[:n]) in known)
        path = tree.find(ids(*sequence))
        tree.cut(path)
        assert path.length == longest
        assert [token for node in path.nodes for token in node.tokens.tolist()] == sequence[:longest]
    tree.check()
