"""What eviction is about to meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.plugins.cache_hiradix.tree import parent_of

if TYPE_CHECKING:
    from pegboard.plugins.cache_hiradix.tree import TierTree


class Outlook:
    """Looks at the device's pages in the order in which they go."""

    def __init__(self, tree: TierTree) -> None:
        self._tree = tree
        self._asked = (-1, 0)
        self._answer = False

    def can_lose(self, pages: int) -> bool:
        """Whether so many pages could be evicted before one that would be lost. Asked again before anything has changed
        it costs nothing.
        """
        asked = (self._tree.settled, pages)
        if self._asked != asked:
            self._asked, self._answer = asked, self._look(pages)
        return self._answer

    def _look(self, pages: int) -> bool:
        """Count leaves that have copies, and what becomes a leaf when they are gone."""
        tree, count = self._tree, 0
        lost = tree.uncopied.first_key
        if lost is None:
            return True
        for entry in tree.victims.before(lost):
            node = entry.node
            while node is not None and tree.key(node.data) < lost:
                count += node.data.device.size
                if count >= pages:
                    return True
                parent = parent_of(node)
                node = parent if parent is not None and parent.data.device_below == 1 else None
        return count >= pages
