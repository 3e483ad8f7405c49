"""The orders of eviction, and the heap that finds the next victim."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.plugins.cache_radix.entry import Entry, Node

TICK_BITS = 48
"""Bits for the ticks of the cache's clock; what comes before them in an order stands above them in a key."""

KEYS: dict[str, Callable[[Entry], int]] = {
    "lru": lambda entry: entry.last_access,
    "lfu": lambda entry: (entry.hits << TICK_BITS) + entry.last_access,
    "fifo": lambda entry: entry.created,
    "slru": lambda entry: (entry.protected << TICK_BITS) + entry.last_access,
    "priority": lambda entry: (entry.priority << TICK_BITS) + entry.last_access,
}
"""The smallest key goes first. One integer each, as they are compared all the time."""


class VictimHeap:
    """The evictable nodes (unlocked leaves) in the order of their keys: a binary heap in which each knows its place.

    So a node whose key or standing changed is put right at once, in O(log n), and finding a victim is never the moment
    when all uses since the last one are made up for.

    heapq with lazy deletion would be shorter, and makes uses cheaper on average. But the search for a victim then pops
    one outdated item per use since the last search, and compaction rebuilds the heap within one match. With 12,500
    entries, each used once, the next eviction of 4096 tokens took 23 ms instead of 0.8 ms, and the slowest match 66 ms
    instead of 8 ms. All running requests wait for a scheduler that stands still that long.
    """

    def __init__(self, key: Callable[[Entry], int]) -> None:
        self._key = key
        self._keys: list[int] = []
        self._nodes: list[Node] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def update(self, node: Node) -> None:
        """Put a node where it belongs now: in the heap under its key, or out of it where it cannot be evicted."""
        entry = node.data
        place = entry.place
        if not evictable(node):
            if place >= 0:
                self._take_out(place)
            return
        key = self._key(entry)
        if place < 0:
            self._nodes.append(node)
            self._keys.append(key)
            self._rise(len(self._nodes) - 1, key, node)
        elif key < self._keys[place]:
            self._rise(place, key, node)
        else:
            self._sink(place, key, node)

    def pop(self) -> Node | None:
        """Take out the next victim; None where nothing is evictable."""
        return self._take_out(0) if self._nodes else None

    def clear(self) -> None:
        for node in self._nodes:
            node.data.place = -1
        self._nodes.clear()
        self._keys.clear()

    def check(self) -> None:
        for place, (key, node) in enumerate(zip(self._keys, self._nodes, strict=True)):
            assert node.data.place == place, f"{node!r} stands at {place}, but says {node.data.place}"
            assert evictable(node), f"{node!r} is a candidate, but cannot be evicted"
            assert self._key(node.data) == key, f"{node!r} stands under an old key"
            assert place == 0 or self._keys[(place - 1) // 2] <= key, f"{node!r} stands below one that goes later"

    def _take_out(self, place: int) -> Node:
        taken = self._nodes[place]
        key, node = self._keys.pop(), self._nodes.pop()
        if node is not taken:
            if key < self._keys[place]:
                self._rise(place, key, node)
            else:
                self._sink(place, key, node)
        taken.data.place = -1
        return taken

    def _rise(self, place: int, key: int, node: Node) -> None:
        """Put a node in at `place`, or above where its key is smaller."""
        keys, nodes = self._keys, self._nodes
        while place:
            above = (place - 1) >> 1
            if keys[above] <= key:
                break
            keys[place] = keys[above]
            moved = nodes[place] = nodes[above]
            moved.data.place = place
            place = above
        keys[place], nodes[place] = key, node
        node.data.place = place

    def _sink(self, place: int, key: int, node: Node) -> None:
        """Put a node in at `place`, or below where its key is larger."""
        keys, nodes = self._keys, self._nodes
        end = len(keys)
        while (below := 2 * place + 1) < end:
            if below + 1 < end and keys[below + 1] < keys[below]:
                below += 1
            if key <= keys[below]:
                break
            keys[place] = keys[below]
            moved = nodes[place] = nodes[below]
            moved.data.place = place
            place = below
        keys[place], nodes[place] = key, node
        node.data.place = place


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
        """Protect the new upper half of a protected node, too."""
        if upper.data.protected:
            self._nodes[upper] = None

    def trimmed(self, node: Node, tokens: int) -> None:
        """Note that a node lost its last `tokens` tokens."""
        if node.data.protected:
            self.tokens -= tokens

    def drop(self, node: Node) -> None:
        """Take a node out of the segment, if it is in it."""
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
