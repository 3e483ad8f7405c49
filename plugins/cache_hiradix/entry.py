"""What the cache with tiers keeps at every node of its tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.toolkit.cache.eviction import Candidate, History
from pegboard.toolkit.cache.radix_tree import RadixNode

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_PAGES = np.empty(0, dtype=np.int64)


class Side(Candidate):
    """An entry's place in another order than that of the device's victims."""

    __slots__ = ("entry",)

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.entry = entry


class Entry(History):
    """The device pages and host pages, int64 each, of a node's tokens, and what holds them.

    Both begin with the node's first page, and the longer one ends with its last: a page that has neither is removed.
    Below a node that lacks some pages on the device nothing is on the device, and likewise for the host.

    `locks` hold the device pages of the whole path to the node, `tails` those host pages that were found behind a
    locked path. `pins` counts the uses of the host pages by loads and jobs. `device_below` and `host_below` count the
    children that have pages there. `device_lost` and `host_lost` grow whenever pages go, so that a handle can tell.
    `node` is None once the node is out of the tree. `unstored`: some pages may be in no storage yet.
    """

    __slots__ = (
        *("device", "device_below", "device_lost", "host", "host_below", "host_lost", "ident"),
        *("locks", "node", "on_host", "pins", "tails", "uncopied", "unstored"),
    )

    def __init__(self, device: NDArray[np.int64], tick: int, priority: int) -> None:
        super().__init__(tick, priority)
        self.device = device
        self.host = NO_PAGES
        self.node: Node | None = None
        self.ident = -1
        self.locks = self.tails = self.pins = 0
        self.device_below = self.host_below = 0
        self.device_lost = self.host_lost = 0
        self.unstored = False
        self.on_host = Side(self)
        self.uncopied = Side(self)

    def split(self, pages: int) -> Entry:
        """Return a new entry for the first `pages` pages, with the same holds and history; the rest stays here."""
        upper = Entry(self.device[:pages].copy(), self.created, self.priority)
        upper.inherit(self)
        upper.host = self.host[:pages].copy()
        upper.locks, upper.tails, upper.unstored = self.locks, self.tails, self.unstored
        self.device, self.host = self.device[pages:].copy(), self.host[pages:].copy()
        return upper

    @property
    def copied(self) -> int:
        """How many device pages have a copy on the host, or are getting one."""
        return min(self.device.size, self.host.size)

    @property
    def leaves_device(self) -> bool:
        """Whether its last device page can be evicted."""
        return bool(self.device.size) and not (self.locks or self.device_below or self.node is None)

    @property
    def leaves_host(self) -> bool:
        """Whether its last host page can be evicted."""
        return bool(self.host.size) and not (self.host_below or self.tails or self.pins or self.node is None)

    @property
    def would_be_lost(self) -> bool:
        """Whether its last device page can be evicted, and has no copy."""
        return self.host.size < self.device.size and self.leaves_device


Node = RadixNode[Entry]


def no_entry() -> Entry:
    """For the root of a namespace: it holds nothing."""
    return Entry(NO_PAGES, 0, 0)
