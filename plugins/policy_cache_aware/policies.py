"""Schedule policies that ask the prefix cache how much of each waiting prompt it holds."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.core.interfaces.prefix_cache import PrefixCache
from pegboard.core.interfaces.req import Req, ReqSlot
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.core.toolkit.radix_tree import RadixNode, RadixTree


@dataclass(slots=True)
class _Match:
    """How many tokens `cache` held at `version` of a request that was `seq_len` tokens long."""

    cache: PrefixCache | None = None
    version: int = -1
    seq_len: int = -1
    length: int = 0


_MATCH = ReqSlot(_Match)


class _CacheAwarePolicy(SchedulePolicy):
    """Falls back to the queue as it stands when it is long, and remembers what it asked and answered.

    A match is asked for again only once the cache's version or the request has changed, and the same queue under the
    same version gets the same order at once.
    """

    def __init__(self, options: Any, ctx: SchedulePolicyContext) -> None:
        super().__init__(options, ctx)
        self._question: tuple[int, list[tuple[str, int]]] | None = None
        self._answer: list[int] = []

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        limit = self.options.fallback_above
        if len(waiting) < 2 or (limit and len(waiting) > limit):
            return list(waiting)
        question = (self.ctx.cache.version, [(req.rid, req.seq_len) for req in waiting])
        if question != self._question:
            matched = [self._matched(req) for req in waiting]
            self._answer = self._rank(waiting, matched)
            self._question = question
        return [waiting[index] for index in self._answer]

    def _matched(self, req: Req) -> int:
        """Tokens of the request that the cache holds."""
        cache, known = self.ctx.cache, _MATCH.of(req)
        if known.cache is not cache or known.version != cache.version or known.seq_len != req.seq_len:
            known.length = len(cache.match(req.matchable_key()))
            known.cache, known.version, known.seq_len = cache, cache.version, req.seq_len
        return known.length

    @abc.abstractmethod
    def _rank(self, waiting: Sequence[Req], matched: Sequence[int]) -> list[int]:
        """Indices into `waiting`, most urgent first; `matched` are the cached tokens of each."""


class LpmPolicy(_CacheAwarePolicy):
    """Longest cached prefix first (SGLang's `lpm`).

    Of waiting requests that share a prefix which is not cached yet, all but the first go behind the others: once the
    first has run, they find it in the cache.
    """

    def _rank(self, waiting: Sequence[Req], matched: Sequence[int]) -> list[int]:
        behind = self._deprioritized(waiting, matched)
        keys = [math.inf if late else -length for late, length in zip(behind, matched, strict=True)]
        return sorted(range(len(waiting)), key=keys.__getitem__)

    def _deprioritized(self, waiting: Sequence[Req], matched: Sequence[int]) -> list[bool]:
        check = self.options.in_batch_check_threshold
        deprioritize = self.options.in_batch_deprioritize_threshold
        firsts: RadixTree[None] = RadixTree(make_root=lambda: None)
        behind = [False] * len(waiting)
        for index, (req, length) in enumerate(zip(waiting, matched, strict=True)):
            if length > check:
                continue
            key = req.matchable_key()
            path = firsts.find(key.tokens, key.namespace)
            if path.length >= deprioritize:
                behind[index] = True
            elif path.length < len(key):
                firsts.extend(path, key.tokens, None)
        return behind


class DfsWeightPolicy(_CacheAwarePolicy):
    """Depth first through the tree of cached prefixes that the queue matches, heaviest branch first (SGLang's
    `dfs-weight`), so that requests which share a prefix run while it is in the cache.

    A branch weighs as many requests as wait below it. The cache's own tree is opaque, so the tree is built from the
    matched prefixes themselves; where no two of them part, a node of the cache changes nothing about the order.
    Requests that end at a node come after those below it, as in SGLang; requests without a match come last.
    """

    def _rank(self, waiting: Sequence[Req], matched: Sequence[int]) -> list[int]:
        tree: RadixTree[list[int]] = RadixTree(self.ctx.cache.page_size, make_root=list, split=_split)
        unmatched: list[int] = []
        for index, (req, length) in enumerate(zip(waiting, matched, strict=True)):
            key = req.key(length)
            node = tree.insert(key.tokens, [], key.namespace)
            (unmatched if node is None else node.data).append(index)
        order: list[int] = []
        weights = _weights(tree)
        stack = _lightest_first([node for root in tree.roots().values() for node in root.children.values()], weights)
        opened: set[RadixNode[list[int]]] = set()
        while stack:
            node = stack[-1]
            if node in opened or node.is_leaf:
                order += node.data
                stack.pop()
            else:
                opened.add(node)
                stack += _lightest_first(list(node.children.values()), weights)
        return order + unmatched


def _split(ending: list[int], at: int) -> tuple[list[int], list[int]]:
    """Requests that end at a node end at its lower half once it is split."""
    return [], ending


def _weights(tree: RadixTree[list[int]]) -> dict[RadixNode[list[int]], int]:
    """How many requests end at each node or below it."""
    weights: dict[RadixNode[list[int]], int] = {}
    for node in reversed(list(tree.nodes())):
        weights[node] = len(node.data) + sum(weights[child] for child in node.children.values())
    return weights


def _lightest_first(
    nodes: list[RadixNode[list[int]]], weights: dict[RadixNode[list[int]], int]
) -> list[RadixNode[list[int]]]:
    """For a stack, whose end is taken first: the heaviest there, and of equals the one that came first."""
    return sorted(nodes, key=lambda node: -weights[node])[::-1]
