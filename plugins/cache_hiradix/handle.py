"""What a caller of the cache with tiers holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.plugins.cache_hiradix.entry import Node


class TierHandle:
    """A path on the device, `length` tokens that end with `node` (None for the empty path), and what was found on the
    host behind it: up to `end`, with the node `tail` (None where there is none).

    When a node is split it stays the lower half, so the handle goes on meaning the same.
    """

    __slots__ = ("_device_lost", "_host_lost", "counted", "end", "length", "locks", "node", "tail", "wanted")

    def __init__(
        self,
        node: Node | None,
        length: int,
        tail: Node | None = None,
        end: int | None = None,
        wanted: int | None = None,
    ) -> None:
        self.node = node
        self.length = length
        self.tail = tail
        self.end = length if end is None else end
        self.wanted = self.end if wanted is None else wanted
        self.counted = wanted is None  # what an insert answers with was not found
        self.locks = 0
        self._device_lost = node.data.device_lost if node is not None else 0
        self._host_lost = tail.data.host_lost if tail is not None else 0

    @property
    def valid(self) -> bool:
        """Whether all of it is where it was. Ends go first, so that only these need to be looked at."""
        node, tail = self.node, self.tail
        if node is not None and not (node.attached and node.data.device_lost == self._device_lost):
            return False
        return tail is None or (tail.attached and tail.data.host_lost == self._host_lost)

    def tail_nodes(self) -> list[Node]:
        """Return the nodes of the host's part, the last one first."""
        nodes: list[Node] = []
        if self.tail is not None:
            for node in self.tail.ancestry():
                if node.end <= self.length:
                    break
                nodes.append(node)
        return nodes
