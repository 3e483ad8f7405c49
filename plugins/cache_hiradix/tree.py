"""The tree of both tiers: which pages a node has on the device and on the host, and what can go next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from pegboard.plugins.cache_hiradix.entry import NO_PAGES, Entry, Node, Side, no_entry
from pegboard.plugins.cache_hiradix.host_book import READY, HostBook
from pegboard.toolkit.cache.eviction import KEYS, Order, ProtectedSegment, VictimHeap
from pegboard.toolkit.cache.radix_tree import RadixRoot, RadixTree, shorten

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.keys import PrefixKey
    from pegboard.toolkit.cache.radix_tree import RadixPath

_LATER = 1 << 128
"""Above all keys of an order."""


class TierTree:
    """Adds and takes pages of either tier, and keeps the counters, the victims and the books that follow from it.

    `changed` is called whenever something else may be found from now on. `device_pages`, `locked_pages` and
    `clean_pages` count the device's: all, the locked ones, and those that are evictable and have a copy.
    """

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        host_pages: int,
        order: Order,
        *,
        copies_first: bool,
        changed: Callable[[], None],
    ) -> None:
        """With `copies_first` host pages of which the device has the original go before all others."""
        self.page_size = page_size
        self.tokens: RadixTree[Entry] = RadixTree(page_size, make_root=no_entry, split=self._divide)
        self.host = HostBook(host_pages)
        self.epoch = np.zeros(num_pages + 1, dtype=np.int64)
        """By device page, how often it has left the cache."""
        self.device_pages = self.locked_pages = self.clean_pages = 0
        self.tails_locked = 0
        self.host_evicted = 0
        self.tick = 0
        self.settled = 0
        """Grows with every change among the victims."""
        self.protected: ProtectedSegment[Entry] | None = None
        self.changed = changed
        self.key = key = KEYS[order]
        self.victims = VictimHeap[Entry](key, lambda entry: entry.leaves_device)
        later = _LATER if copies_first else 0
        self.host_victims = VictimHeap[Side](
            lambda side: key(side.entry) + (later if side.entry.host.size > side.entry.device.size else 0),
            lambda side: side.entry.leaves_host,
        )
        self.uncopied = VictimHeap[Side](lambda side: key(side.entry), lambda side: side.entry.would_be_lost)
        self.entries: dict[int, Entry] = {}
        """All entries by their idents."""
        self._idents = 0

    # ---- looking ---------------------------------------------------------------------------------------------------

    def extent(self, path: RadixPath[Entry]) -> tuple[int, int]:
        """How many tokens of a path, from its start, are on the device, and how many could be found with what the host
        has behind that: there, all pages from the root on must be copied and no longer on their way, as one that is
        not may take those below along.
        """
        device = host = path.length
        for node in path.nodes:
            there = node.data.device.size * self.page_size
            if there < len(node):
                device = min(device, node.start + there)
                break
        if device == path.length:
            return device, device
        for node in path.nodes:
            ready = self.ready(node.data) * self.page_size
            if ready < len(node):
                host = min(host, node.start + ready)
                break
        return device, max(device, host)

    def ready(self, entry: Entry) -> int:
        """How many of an entry's host pages, from the first on, have what they should."""
        if not entry.pins:  # what is on its way is pinned
            return entry.host.size
        waiting = self.host.state[entry.host] != READY
        return int(waiting.argmax()) if waiting.any() else entry.host.size

    def cut(self, nodes: list[Node], device: int, end: int) -> tuple[list[Node], list[Node]]:
        """Divide a path into the nodes of its first `device` tokens and those from there to `end`, splitting nodes in
        which one of them ends.
        """
        while nodes and nodes[-1].start >= end:
            nodes.pop()
        if nodes and nodes[-1].end > end:
            nodes[-1] = self.split(nodes[-1], end - nodes[-1].start)
        at = len(nodes)
        while at and nodes[at - 1].end > device:
            at -= 1
        if at < len(nodes) and nodes[at].start < device:
            nodes.insert(at, self.split(nodes[at], device - nodes[at].start))
            at += 1
        return nodes[:at], nodes[at:]

    def end_node(self, path: RadixPath[Entry]) -> None:
        """Have a node end where a path does."""
        if not path.whole:
            last = path.nodes[-1]
            path.nodes[-1] = self.split(last, path.length - last.start)

    def touch(self, nodes: list[Node]) -> None:
        """Note that a path was found."""
        self.tick += 1
        for node in nodes:
            node.data.last_access = self.tick
            node.data.hits += 1
        if self.protected is not None:
            for node in self.protected.promote(reversed(nodes), self.tick):
                self.settle(node.data)
        for node in nodes:
            self._reorder(node.data)

    def used(self, node: Node | None, priority: int) -> None:
        """Note that a path was inserted again."""
        if node is not None:
            for one in node.ancestry():
                one.data.last_access = self.tick
                one.data.priority = max(one.data.priority, priority)
                self._reorder(one.data)

    def now_ready(self, node: Node) -> None:
        """Note that pages of a node have arrived on the host: what only the host has below them can be found then."""
        todo = [node]
        while todo:
            one = todo.pop()
            if one.data.device.size < one.data.host.size:
                self.changed()
                return
            todo += [child for child in one.children.values() if child.data.host.size]

    def owner_of(self, page: int) -> Entry:
        """Return the entry that has a host page."""
        return self.entries[int(self.host.owner[page])]

    def protect(self, tokens: int) -> None:
        """Keep a protected segment of so many tokens."""
        self.protected = ProtectedSegment(tokens)

    # ---- adding ----------------------------------------------------------------------------------------------------

    def split(self, node: Node, at: int) -> Node:
        """Divide a node after `at` tokens; the new upper half."""
        upper = self.tokens.split(node, at)
        entry, lower = upper.data, node.data
        self._enter(upper)
        self.host.owner[entry.host] = entry.ident
        entry.device_below, entry.host_below = int(lower.device.size > 0), int(lower.host.size > 0)
        entry.pins = int(self.host.pins[entry.host].sum())
        lower.pins -= entry.pins
        if self.protected is not None:
            self.protected.split(upper)
        self.settle(entry)
        self.settle(lower)
        return upper

    def add_leaf(self, path: RadixPath[Entry], key: PrefixKey, priority: int) -> Node:
        """Add a leaf without pages yet for what of a key's whole pages lies beyond a path."""
        leaf = self.tokens.extend(path, key.tokens, Entry(NO_PAGES, self.tick, priority))
        self._enter(leaf)
        return leaf

    def add_device(self, node: Node, pages: NDArray[np.int64]) -> None:
        """Add device pages behind those that a node has."""
        entry = node.data
        self._count(entry, -1)
        if not entry.device.size and node.parent is not None:
            node.parent.data.device_below += 1
            self.settle(node.parent.data)
        entry.device = np.concatenate((entry.device, pages))
        self._count(entry, 1)
        self.settle(entry)
        self.changed()

    def add_host(self, node: Node, pages: NDArray[np.int64], state: int) -> None:
        """Add host pages behind those that a node has."""
        entry = node.data
        self._count(entry, -1)
        if not entry.host.size and node.parent is not None:
            node.parent.data.host_below += 1
            self.settle(node.parent.data)
        entry.host = np.concatenate((entry.host, pages))
        self.host.owner[pages] = entry.ident
        self.host.state[pages] = state
        entry.pins += int(self.host.pins[pages].sum())
        self._count(entry, 1)
        self.settle(entry)

    def take_host(self, count: int, state: int, below: Node | None) -> NDArray[np.int64]:
        """Return up to `count` host pages, evicting others for them, but nothing above `below`: they go behind it."""
        if below is not None:
            below.data.tails += 1
            self.settle(below.data)
        while self.host.free < count and (side := self.host_victims.pop()) is not None:
            pages = side.entry.host.size
            missing = min(pages, count - self.host.free)
            self.host_evicted += missing
            self._cut_host(_node_of(side.entry), pages - missing)
        if below is not None:
            below.data.tails -= 1
            self.settle(below.data)
        return self.host.take(min(count, self.host.free), state)

    # ---- taking away -----------------------------------------------------------------------------------------------

    def cut_device(self, node: Node, keep: int) -> NDArray[np.int64]:
        """Take all but the first `keep` device pages from a node below which the device has none; these pages."""
        entry = node.data
        pages = entry.device[keep:]
        self.epoch[pages] += 1
        self._count(entry, -1)
        entry.device = shorten(entry.device, keep)
        entry.device_lost += 1
        self._count(entry, 1)
        if not keep and node.parent is not None:
            node.parent.data.device_below -= 1
            self.settle(node.parent.data)
        self._trim(node)
        self.changed()
        return pages

    def drop_host(self, node: Node, keep: int) -> None:
        """Give up all but the first `keep` host pages of a node, and all those below."""
        order, todo = [], [node]
        while todo:
            one = todo.pop()
            order.append(one)
            todo += [child for child in one.children.values() if child.data.host.size]
        for one in reversed(order):
            self._cut_host(one, keep if one is node else 0)

    def clear(self) -> NDArray[np.int64]:
        """Forget everything; the device pages. Host pages that are in use are out of it once they are not."""
        device, host = [NO_PAGES], [NO_PAGES]
        for node in self.tokens.nodes():
            node.data.node = None
            device.append(node.data.device)
            host.append(node.data.host)
        self.tokens.clear()
        for heap in (self.host_victims, self.uncopied):
            heap.clear()
        self.victims.clear()
        if self.protected is not None:
            self.protected.clear()
        self.entries.clear()
        self.settled += 1
        pages = np.concatenate(device)
        self.epoch[pages] += 1
        self.host.give(np.concatenate(host))
        self.device_pages = self.clean_pages = 0
        self.changed()
        return pages

    # ---- holding ---------------------------------------------------------------------------------------------------

    def lock(self, node: Node | None, by: int) -> None:
        """Add to the locks on the device pages of the path to a node."""
        if node is None:
            return
        for one in node.ancestry():
            entry = one.data
            before, entry.locks = entry.locks, entry.locks + by
            if not (before and entry.locks):
                sign = 1 if by > 0 else -1
                self.locked_pages += sign * entry.device.size
                self.clean_pages -= sign * entry.copied
        self.settle(node.data)

    def lock_tail(self, nodes: list[Node], by: int) -> None:
        """Add to the locks on the host pages of nodes."""
        for node in nodes:
            node.data.tails += by
        if nodes:
            self.tails_locked += by
            self.settle(nodes[0].data)

    def pin(self, pages: NDArray[np.int64]) -> None:
        """Keep host pages as they are until `unpin`."""
        self.host.pin(pages)
        self._pinned(pages, 1)

    def unpin(self, pages: NDArray[np.int64]) -> None:
        self._pinned(pages, -1)
        self.host.unpin(pages)

    def settle(self, entry: Entry) -> None:
        """Put an entry where it belongs among the victims."""
        self.settled += 1
        self.victims.update(entry)
        self.host_victims.update(entry.on_host)
        self.uncopied.update(entry.uncopied)

    def _reorder(self, entry: Entry) -> None:
        """Put an entry right whose key has changed."""
        if entry.place >= 0 or entry.on_host.place >= 0:
            self.settle(entry)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _divide(self, entry: Entry, at: int) -> tuple[Entry, Entry]:
        return entry.split(at // self.page_size), entry

    def _enter(self, node: Node) -> None:
        self._idents += 1
        node.data.node, node.data.ident = node, self._idents
        self.entries[self._idents] = node.data

    def _count(self, entry: Entry, sign: int) -> None:
        """Add or take what an entry counts for."""
        self.device_pages += sign * entry.device.size
        if not entry.locks:
            self.clean_pages += sign * entry.copied

    def _pinned(self, pages: NDArray[np.int64], by: int) -> None:
        owners = self.host.owner[pages]
        idents, counts = np.unique(owners[owners >= 0], return_counts=True)
        for ident, count in zip(idents.tolist(), counts.tolist(), strict=True):
            entry = self.entries[ident]
            entry.pins += by * count
            self.settle(entry)

    def _cut_host(self, node: Node, keep: int) -> None:
        """Give up all but the first `keep` host pages of a node below which the host has none."""
        entry = node.data
        pages = entry.host[keep:]
        entry.pins -= int(self.host.pins[pages].sum())
        self._count(entry, -1)
        entry.host = shorten(entry.host, keep)
        entry.host_lost += 1
        self._count(entry, 1)
        self.host.give(pages)
        if not keep and pages.size and node.parent is not None:
            node.parent.data.host_below -= 1
            self.settle(node.parent.data)
        self._trim(node)

    def _trim(self, node: Node) -> None:
        """Remove those pages of a node that neither tier has any more."""
        entry = node.data
        kept = max(entry.device.size, entry.host.size) * self.page_size
        gone = len(node) - kept
        if not kept:
            if self.protected is not None:
                self.protected.drop(node)
            self.tokens.remove(node)
            del self.entries[entry.ident]
            entry.node = None
        elif gone:
            self.tokens.trim(node, gone)
            if self.protected is not None:
                self.protected.trimmed(node, gone)
        if gone:
            self.changed()
        self.settle(entry)


def _node_of(entry: Entry) -> Node:
    if entry.node is None:
        raise AssertionError("a candidate for eviction is not in the tree")
    return entry.node


def parent_of(node: Node) -> Node | None:
    """Return what a node goes on from; None at a root."""
    return None if node.parent is None or isinstance(node.parent, RadixRoot) else node.parent
