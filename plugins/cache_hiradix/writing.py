"""When pages are copied to the host: the write policies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pegboard.plugins.cache_hiradix.counters import Counters
from pegboard.plugins.cache_hiradix.jobs import Leftovers
from pegboard.plugins.cache_hiradix.outlook import Outlook
from pegboard.plugins.cache_hiradix.prefetching import Prefetcher
from pegboard.plugins.cache_hiradix.saving import Saver
from pegboard.plugins.cache_hiradix.storing import Storer
from pegboard.toolkit.cache.block_keys import BlockKeys

if TYPE_CHECKING:
    from pegboard.core.interfaces.keys import PrefixMemo
    from pegboard.plugins.cache_hiradix.entry import Node
    from pegboard.plugins.cache_hiradix.options import HiRadixOptions
    from pegboard.plugins.cache_hiradix.tree import TierTree
    from pegboard.plugins.kv_tiers.api import Tiers

RESET_SECONDS = 1.0
"""How long a reset waits for cancelled jobs; the host pages of those that go on stay out of use until they end."""


class Writing:
    """Has pages copied to the host as a policy says, where there is a host tier."""

    def __init__(self, options: HiRadixOptions, tree: TierTree, tiers: Tiers, counters: Counters) -> None:
        mover = tiers.mover
        self._policy = options.write_policy
        self._hits_to_save = options.hits_to_save
        self._sync_pages = options.sync_tokens // tree.page_size
        # More copies than half of the host's pages would push each other out.
        self._wanted_clean = math.ceil(min(options.clean_share * (tree.epoch.size - 1), tree.host.num_pages / 2))
        self._tree = tree
        self._outlook = Outlook(tree)
        self._counters = counters
        self.leftovers = Leftovers(tree, mover)
        self.saver = Saver(tree, mover, options.save_batch, counters, self.leftovers)
        keys = BlockKeys(tiers.identity, mover.block_pages * tree.page_size)
        self.storer = Storer(tree, mover, keys, options, counters, self.leftovers)
        self.prefetcher = Prefetcher(tree, mover, keys, options, counters, self.leftovers, self.saver)
        self._stores = bool(mover.stores)
        if self._stores:
            self.saver.saved = self._offer
        self._synced = 0
        self._stuck = False
        self._closed = False

    @property
    def busy(self) -> bool:
        jobs = len(self.saver) or len(self.storer) or len(self.prefetcher) or len(self.leftovers)
        return bool(jobs or self._synced or self._cleaning)

    def used(self, node: Node, memo: PrefixMemo | None) -> None:
        """Note that the path to a node was inserted, or found."""
        self._stuck = False
        if self._closed:
            return
        if self._stores:
            self.storer.offer(node, memo)
        if self._policy == "write_back":
            return
        if self._policy == "write_through":
            self.saver.save(node, memo)
            return
        for one in node.ancestry():
            if one.data.hits + 1 >= self._hits_to_save:
                self.saver.save(one, memo)
                break

    def evicting(self, node: Node, keep: int) -> None:
        """Note that all but the first `keep` device pages of a node are about to go."""
        if self._policy != "write_back":
            return
        self._stuck = False
        lost = node.data.device.size - max(keep, node.data.host.size)
        if lost <= 0:
            return
        size = self._tree.page_size
        wanted = self.saver.wanted(node)
        if not self._closed and wanted <= self._sync_pages - self._synced:
            self._synced += wanted
            if self.saver.save_now(node):
                self._counters.rescued += wanted * size
                return
        self._counters.dropped += lost * size

    def poll(self) -> None:
        self.saver.poll()
        self.storer.poll()
        self.prefetcher.poll()
        self.leftovers.poll()
        self._synced = 0
        while self._cleaning and (side := self._tree.uncopied.pop()) is not None:
            clean = self._tree.clean_pages
            if side.entry.node is not None:
                self._counters.cleaned += self.saver.save(side.entry.node) * self._tree.page_size
            self._tree.settle(side.entry)
            self._stuck = self._tree.clean_pages <= clean  # no room, or only that of other copies

    def stop(self) -> None:
        """Let go of all jobs, and wait for their end a little."""
        self.prefetcher.cancel()
        self.storer.cancel()
        self.saver.cancel()
        self.leftovers.wait(RESET_SECONDS)

    def close(self) -> None:
        """Begin nothing more."""
        self._closed = self.prefetcher.closed = True
        self.prefetcher.cancel()

    def _offer(self, node: Node, memo: PrefixMemo | None) -> None:
        if not self._closed:
            self.storer.offer(node, memo)

    @property
    def _cleaning(self) -> bool:
        if self._policy != "write_back" or self._stuck or self._closed:
            return False
        return bool(len(self._tree.uncopied)) and not self._outlook.can_lose(self._wanted_clean)
