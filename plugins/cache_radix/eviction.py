"""The orders of eviction, and the heap that finds the next victim."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.plugins.cache_radix.entry import Entry, Node

KEYS: dict[str, Callable[[Entry], tuple[int, ...]]] = {
    "lru": lambda entry: (entry.last_access,),
    "lfu": lambda entry: (entry.hits, entry.last_access),
    "fifo": lambda entry: (entry.created,),
    "slru": lambda entry: (entry.protected, entry.last_access),
    "priority": lambda entry: (entry.priority, entry.last_access),
}
"""The smallest key goes first."""


class VictimHeap:
    """The evictable nodes (unlocked leaves) in the order of their keys; every call costs O(log n).

    Entries are lazy: a node that was locked, extended or used again stays where it is, and is put right only when it
    comes up. That works because use only makes keys grow; where one shrinks, the node has to be offered again.
    """

    def __init__(self, key: Callable[[Entry], tuple[int, ...]]) -> None:
        self._key = key
        self._heap: list[tuple[tuple[int, ...], int, Node]] = []
        self._serial = itertools.count()

    def __len__(self) -> int:
        """Entries, outdated ones included."""
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """Consider a node from now on. Harmless for one that is there already or cannot be evicted."""
        entry = node.data
        key = self._key(entry)
        if evictable(node) and (entry.queued is None or key < entry.queued):
            entry.queued = key
            heapq.heappush(self._heap, (key, next(self._serial), node))

    def pop(self) -> Node | None:
        """Take out the next victim; None where nothing is evictable."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            entry = node.data
            if entry.queued != key:
                continue
            entry.queued = None
            if self._key(entry) == key and evictable(node):
                return node
            self.offer(node)
        return None

    def compact(self, limit: int) -> None:
        """Throw out outdated entries where there are more than `limit` entries."""
        if len(self._heap) > limit:
            nodes = {node: None for _, _, node in self._heap}
            self.clear()
            for node in nodes:
                self.offer(node)

    def clear(self) -> None:
        for _, _, node in self._heap:
            node.data.queued = None
        self._heap.clear()


class ProtectedSegment:
    """The protected part of a segmented LRU (Karedla, Love and Wherry 1994): entries that were found again.

    When it outgrows `capacity` tokens, its least recently found nodes go back to the others, as the most recent there.
    So prefixes that are used once, however many, push out nothing that has proven useful.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = 0
        self._nodes: dict[Node, None] = {}  # least recently found first

    def promote(self, nodes: Iterable[Node], tick: int) -> list[Node]:
        """Protect `nodes`, the last one being the most recent. Returns the nodes that lost their protection."""
        for node in nodes:
            if len(node) > self.capacity:
                continue
            if node.data.protected:
                del self._nodes[node]
            else:
                node.data.protected = True
                self.tokens += len(node)
            self._nodes[node] = None
        demoted = []
        while self.tokens > self.capacity:
            node = next(iter(self._nodes))
            self.drop(node)
            node.data.last_access = tick
            demoted.append(node)
        return demoted

    def split(self, upper: Node) -> None:
        """A protected node was split: the new upper half is protected too."""
        if upper.data.protected:
            self._nodes[upper] = None

    def trimmed(self, node: Node, tokens: int) -> None:
        """A node lost its last `tokens` tokens."""
        if node.data.protected:
            self.tokens -= tokens

    def drop(self, node: Node) -> None:
        """A node leaves the segment, if it is in it."""
        if node.data.protected:
            node.data.protected = False
            del self._nodes[node]
            self.tokens -= len(node)

    def clear(self) -> None:
        self._nodes.clear()
        self.tokens = 0

    def check(self) -> None:
        assert all(node.attached and node.data.protected for node in self._nodes), "an evicted node is protected"
        count = sum(len(node) for node in self._nodes)
        assert self.tokens == count, f"{count} tokens are protected, but {self.tokens} counted"
        assert count <= self.capacity, f"{count} tokens are protected, more than {self.capacity}"


def evictable(node: Node) -> bool:
    return node.is_leaf and not node.data.locks and node.attached
