"""The orders of eviction, and the heap that finds the next victim."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Literal, TypeVar

from pegboard.toolkit.cache.radix_tree import RadixNode

TICK_BITS = 48
"""Bits for the ticks of the cache's clock; what comes before them in an order stands above them in a key."""

Order = Literal["lru", "lfu", "fifo", "slru", "priority"]
"""What goes first: the least recently used, the least often found, the oldest, the least recently used of those never
found again, the lowest priority.
"""


class Candidate:
    """What may stand in one heap of victims, and knows its place there; -1 where it stands in none."""

    __slots__ = ("place",)

    def __init__(self) -> None:
        self.place = -1


class History(Candidate):
    """What eviction goes by. Times are ticks of the cache's own clock."""

    __slots__ = ("created", "hits", "last_access", "priority", "protected")

    def __init__(self, tick: int, priority: int) -> None:
        self.place = -1
        self.created = tick
        self.last_access = tick
        self.hits = 0
        self.priority = priority
        self.protected = False

    def inherit(self, other: History) -> None:
        """Take over the history of an entry that this one was part of."""
        self.created, self.last_access, self.hits = other.created, other.last_access, other.hits
        self.priority, self.protected = other.priority, other.protected


KEYS: dict[Order, Callable[[History], int]] = {
    "lru": lambda entry: entry.last_access,
    "lfu": lambda entry: (entry.hits << TICK_BITS) + entry.last_access,
    "fifo": lambda entry: entry.created,
    "slru": lambda entry: (entry.protected << TICK_BITS) + entry.last_access,
    "priority": lambda entry: (entry.priority << TICK_BITS) + entry.last_access,
}
"""The smallest key goes first. One integer each, as they are compared all the time."""


C = TypeVar("C", bound=Candidate)
H = TypeVar("H", bound=History)


class VictimHeap(Generic[C]):
    """What can be evicted, in the order of the keys: a binary heap in which each candidate knows its place.

    So one whose key or standing changed is put right at once, in O(log n), and finding a victim is never the moment
    when all uses since the last one are made up for.

    heapq with lazy deletion would be shorter, and makes uses cheaper on average. But the search for a victim then pops
    one outdated item per use since the last search, and compaction rebuilds the heap within one match. With 12,500
    entries, each used once, the next eviction of 4096 tokens took 23 ms instead of 0.8 ms, and the slowest match 66 ms
    instead of 8 ms. All running requests wait for a scheduler that stands still that long.
    """

    def __init__(self, key: Callable[[C], int], evictable: Callable[[C], bool]) -> None:
        self._key = key
        self._evictable = evictable
        self._keys: list[int] = []
        self._items: list[C] = []

    def __len__(self) -> int:
        return len(self._items)

    def update(self, item: C) -> None:
        """Put one where it belongs now: in the heap under its key, or out of it where it cannot be evicted."""
        place = item.place
        if not self._evictable(item):
            if place >= 0:
                self._take_out(place)
            return
        key = self._key(item)
        if place < 0:
            self._items.append(item)
            self._keys.append(key)
            self._rise(len(self._items) - 1, key, item)
        elif key < self._keys[place]:
            self._rise(place, key, item)
        else:
            self._sink(place, key, item)

    def pop(self) -> C | None:
        """Take out the next victim; None where nothing is evictable."""
        return self._take_out(0) if self._items else None

    @property
    def first_key(self) -> int | None:
        """The key of the next victim; None where nothing is evictable."""
        return self._keys[0] if self._keys else None

    def before(self, key: int) -> Iterator[C]:
        """Go through the candidates of smaller keys, in no order. Looks at no others but for those next to them."""
        todo = [0]
        while todo:
            place = todo.pop()
            if place < len(self._keys) and self._keys[place] < key:
                yield self._items[place]
                todo += (2 * place + 1, 2 * place + 2)

    def clear(self) -> None:
        for item in self._items:
            item.place = -1
        self._items.clear()
        self._keys.clear()

    def check(self) -> None:
        for place, (key, item) in enumerate(zip(self._keys, self._items, strict=True)):
            assert item.place == place, f"{item!r} stands at {place}, but says {item.place}"
            assert self._evictable(item), f"{item!r} is a candidate, but cannot be evicted"
            assert self._key(item) == key, f"{item!r} stands under an old key"
            assert place == 0 or self._keys[(place - 1) // 2] <= key, f"{item!r} stands below one that goes later"

    def _take_out(self, place: int) -> C:
        taken = self._items[place]
        key, item = self._keys.pop(), self._items.pop()
        if item is not taken:
            if key < self._keys[place]:
                self._rise(place, key, item)
            else:
                self._sink(place, key, item)
        taken.place = -1
        return taken

    def _rise(self, place: int, key: int, item: C) -> None:
        """Put one in at `place`, or above where its key is smaller."""
        keys, items = self._keys, self._items
        while place:
            above = (place - 1) >> 1
            if keys[above] <= key:
                break
            keys[place] = keys[above]
            moved = items[place] = items[above]
            moved.place = place
            place = above
        keys[place], items[place] = key, item
        item.place = place

    def _sink(self, place: int, key: int, item: C) -> None:
        """Put one in at `place`, or below where its key is larger."""
        keys, items = self._keys, self._items
        end = len(keys)
        while (below := 2 * place + 1) < end:
            if below + 1 < end and keys[below + 1] < keys[below]:
                below += 1
            if key <= keys[below]:
                break
            keys[place] = keys[below]
            moved = items[place] = items[below]
            moved.place = place
            place = below
        keys[place], items[place] = key, item
        item.place = place


class ProtectedSegment(Generic[H]):
    """The protected part of a segmented LRU (Karedla, Love and Wherry 1994): entries that were found again.

    When it outgrows `capacity` tokens, its least recently found nodes go back to the others, as the most recent there.
    So prefixes that are used once, however many, push out nothing that has proven useful.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens = 0
        self._nodes: dict[RadixNode[H], None] = {}  # least recently found first

    def promote(self, nodes: Iterable[RadixNode[H]], tick: int) -> list[RadixNode[H]]:
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
        demoted: list[RadixNode[H]] = []
        while self.tokens > self.capacity:
            node = next(iter(self._nodes))
            self.drop(node)
            node.data.last_access = tick
            demoted.append(node)
        return demoted

    def split(self, upper: RadixNode[H]) -> None:
        """Protect the new upper half of a protected node, too."""
        if upper.data.protected:
            self._nodes[upper] = None

    def trimmed(self, node: RadixNode[H], tokens: int) -> None:
        """Note that a node lost its last `tokens` tokens."""
        if node.data.protected:
            self.tokens -= tokens

    def drop(self, node: RadixNode[H]) -> None:
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
