"""Ways in which draft trees are ill-formed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegboard.core.interfaces.trees import TokenTrees


@dataclass(frozen=True, slots=True)
class Tree:
    """One request's tree."""

    tokens: list[int]
    parents: list[int]


Lie = Callable[[list[Tree], int, int], Any]
"""Trees, the most nodes that the last of them may have, and the vocabulary's size; to what is answered."""


def pack(trees: Sequence[Tree]) -> TokenTrees:
    """Return the trees as they are, good or bad."""
    return TokenTrees(
        np.array([len(tree.tokens) for tree in trees], np.int64),
        np.array([token for tree in trees for token in tree.tokens], np.int64),
        np.array([parent for tree in trees for parent in tree.parents], np.int64),
    )


def _last(trees: list[Tree], tokens: Sequence[int], parents: Sequence[int]) -> TokenTrees:
    """Return the trees with another one in place of the last."""
    return pack([*trees[:-1], Tree(list(tokens), list(parents))])


def _root(trees: list[Tree]) -> int:
    return trees[-1].tokens[0] if trees else 0


def _of_another_type(trees: list[Tree], most: int, vocab_size: int) -> TokenTrees:
    good = pack(trees)
    return TokenTrees(good.counts.astype(np.int32), good.tokens, good.parents)


def _too_many(trees: list[Tree], most: int, vocab_size: int) -> TokenTrees:
    count = most + 1
    return _last(trees, [_root(trees), *(node % vocab_size for node in range(1, count))], range(-1, count - 1))


def _counts_that_are_off(trees: list[Tree], most: int, vocab_size: int) -> TokenTrees:
    good = pack(trees)
    return TokenTrees(good.counts, np.append(good.tokens, 0), np.append(good.parents, 0))


def _lists(trees: list[Tree], most: int, vocab_size: int) -> TokenTrees:
    lists: Any = [1], [0], [-1]
    return TokenTrees(*lists)


LIES: dict[str, Lie] = {
    "no": lambda trees, most, size: pack(trees),
    "nothing": lambda trees, most, size: None,
    "type": _of_another_type,
    "lists": _lists,
    "missing": lambda trees, most, size: pack(trees[:-1]),
    "empty": lambda trees, most, size: _last(trees, [], []),
    "many": _too_many,
    "lengths": _counts_that_are_off,
    "order": lambda trees, most, size: _last(trees, [_root(trees), 1], [-1, 1]),
    "roots": lambda trees, most, size: _last(trees, [_root(trees), 1], [-1, -1]),
    "parent": lambda trees, most, size: _last(trees, [_root(trees), 1], [-1, -2]),
    "root": lambda trees, most, size: _last(trees, [(_root(trees) + 1) % size], [-1]),
    "vocabulary": lambda trees, most, size: _last(trees, [_root(trees), size], [-1, 0]),
    "negative": lambda trees, most, size: _last(trees, [_root(trees), -1], [-1, 0]),
    "siblings": lambda trees, most, size: _last(trees, [_root(trees), 1, 1], [-1, 0, 0]),
}
"""What is answered, by what is wrong with it. Some need two or three nodes to be told; with fewer, the tree is also too
large."""
