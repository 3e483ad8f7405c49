"""Copying pages to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pegboard.plugins.cache_hiradix.host_book import FILLING, READY
from pegboard.plugins.cache_hiradix.tree import parent_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pegboard.core.interfaces.keys import PrefixMemo
    from pegboard.plugins.cache_hiradix.counters import Counters
    from pegboard.plugins.cache_hiradix.entry import Entry, Node
    from pegboard.plugins.cache_hiradix.jobs import Leftovers
    from pegboard.plugins.cache_hiradix.tree import TierTree
    from pegboard.plugins.kv_tiers.api import Job, PageMover

SYNC_SECONDS = 0.05
"""How long an eviction waits for a copy at most."""


@dataclass(frozen=True, slots=True, eq=False)
class Save:
    """A copy under way of a run of one path: device pages, each in the epoch in which it was, to host pages, int64 [n]
    each.
    """

    job: Job
    device: NDArray[np.int64]
    host: NDArray[np.int64]
    epochs: NDArray[np.int64]
    memo: PrefixMemo | None


class Saver:
    """Copies the pages of paths to the host, from the root on.

    Device pages are not held meanwhile. One that has left the cache before its copy was done may have been written to,
    so its copy is given up, with all that the host has below it. `saved` is called with each path that has new copies.
    """

    def __init__(
        self, tree: TierTree, mover: PageMover, batch_tokens: int, counters: Counters, leftovers: Leftovers
    ) -> None:
        self._tree = tree
        self._mover = mover
        self._batch = max(1, batch_tokens // tree.page_size)
        self._counters = counters
        self._leftovers = leftovers
        self._saves: list[Save] = []
        self.saved: Callable[[Node, PrefixMemo | None], None] = lambda node, memo: None

    def __len__(self) -> int:
        return len(self._saves)

    def save(self, node: Node, memo: PrefixMemo | None = None) -> int:
        """Begin to copy what the path to a node has on the device alone, as far as there is room; how many pages."""
        tree, path = self._tree, _uncopied(node)
        if not path:
            return 0
        wanted = sum(one.data.device.size - one.data.host.size for one in path)
        below = path[0] if path[0].data.host.size else parent_of(path[0])
        pages = tree.take_host(wanted, FILLING, below)
        self._counters.skipped += (wanted - pages.size) * tree.page_size
        device, at = [], 0
        for one in path:
            have = one.data.host.size
            run = one.data.device[have : have + pages.size - at]
            if not run.size:
                break
            device.append(run)
            tree.add_host(one, pages[at : at + run.size], FILLING)
            at += run.size
        if at:
            self._launch(np.concatenate(device), pages, memo)
        return at

    def poll(self) -> None:
        """Take the results of copies that have ended."""
        if not any(save.job.done for save in self._saves):
            return
        ended = [save for save in self._saves if save.job.done]
        self._saves = [save for save in self._saves if not save.job.done]
        for save in ended:
            self._finish(save)

    def save_now(self, node: Node) -> bool:
        """Copy what the path to a node has on the device alone, and wait for it a moment; whether all of it was."""
        known, wanted = len(self._saves), self.wanted(node)
        begun = self.save(node)
        jobs = [save.job for save in self._saves[known:]]
        if jobs:
            self._mover.wait(jobs, SYNC_SECONDS)
            self.poll()
        return begun == wanted and self._ready(node)

    def wanted(self, node: Node) -> int:
        """How many pages of the path to a node are on the device alone."""
        return sum(one.data.device.size - one.data.host.size for one in _uncopied(node))

    def cancel(self) -> None:
        """Let go of all copies under way."""
        for save in self._saves:
            self._leftovers.leave(save.job, save.host)
        self._saves.clear()

    def _ready(self, node: Node) -> bool:
        entry = node.data
        return self._tree.ready(entry) == entry.host.size >= entry.device.size

    def _launch(self, device: NDArray[np.int64], host: NDArray[np.int64], memo: PrefixMemo | None) -> None:
        for start in range(0, device.size, self._batch):
            from_, to = device[start : start + self._batch], host[start : start + self._batch]
            self._saves.append(Save(self._mover.save(from_, to), from_, to, self._tree.epoch[from_], memo))

    def _finish(self, save: Save) -> None:
        tree, state = self._tree, self._tree.host.state
        copied = np.arange(save.host.size) < save.job.result
        intact = self._intact(save)
        tree.unpin(save.host)
        kept = state[save.host] == FILLING
        good, bad = save.host[kept & copied & intact], save.host[kept & ~(copied & intact)]
        state[good] = READY
        for page in bad.tolist():
            if state[page] == FILLING:  # those behind it go along
                entry = tree.owner_of(page)
                tree.drop_host(_node_of(entry), int(np.flatnonzero(entry.host == page)[0]))
        size = tree.page_size
        self._counters.torn += int((~intact).sum()) * size
        self._counters.failed += int((intact & ~copied).sum()) * size
        self._counters.saved += good.size * size
        self._tell(good, save.memo)

    def _intact(self, save: Save) -> NDArray[np.bool_]:
        """Which device pages have been in the cache all the time."""
        same: NDArray[np.bool_] = self._tree.epoch[save.device] == save.epochs
        return same

    def _tell(self, good: NDArray[np.int64], memo: PrefixMemo | None) -> None:
        good = good[self._tree.host.state[good] == READY]
        if not good.size:
            return
        self._tree.now_ready(_node_of(self._tree.owner_of(int(good[0]))))
        node = _node_of(self._tree.owner_of(int(good[-1])))
        for ident in np.unique(self._tree.host.owner[good]).tolist():
            self._tree.entries[ident].unstored = True
        self.saved(node, memo)


def _uncopied(node: Node) -> list[Node]:
    """Return the nodes of a path that are not whole on the host, from the root on."""
    path: list[Node] = []
    for one in node.ancestry():
        if one.data.host.size >= one.data.device.size:
            break
        path.append(one)
    return path[::-1]


def _node_of(entry: Entry) -> Node:
    if entry.node is None:
        raise AssertionError("a host page belongs to an entry that is not in the tree")
    return entry.node
