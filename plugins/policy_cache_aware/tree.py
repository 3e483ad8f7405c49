"""The tree of the cached prefixes that a queue matches, kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.core.interfaces.req import Req
from pegboard.toolkit.cache.radix_tree import RadixNode, RadixTree


class Branch:
    """A node's part: how many requests end at it, and for the order being made how many there are at it and below
    (`weight`), the place in the queue of the first of them, and the places of those that end here.
    """

    __slots__ = ("ending", "first", "here", "weight")

    def __init__(self) -> None:
        self.ending = 0
        self.weight = 0
        self.first = 0
        self.here: list[int] = []


Node = RadixNode[Branch]


class PrefixTree:
    """Where each waiting request's cached prefix ends. Only what has changed since the last call is walked again."""

    def __init__(self, page_size: int) -> None:
        self._tree: RadixTree[Branch] = RadixTree(page_size, make_root=Branch, split=_split)
        self._ends: dict[Req, tuple[int, Node | None]] = {}

    def __len__(self) -> int:
        """Return how many nodes it has."""
        return self._tree.num_nodes

    def place(self, waiting: Sequence[Req], lengths: Sequence[int]) -> None:
        """Hold these requests and no others; of each the first `lengths` tokens are cached."""
        ends = self._ends
        for req in ends.keys() - set(waiting):
            self._leave(ends.pop(req)[1])
        for req, length in zip(waiting, lengths, strict=True):
            end = ends.get(req)
            if end is None or end[0] != length:
                self._enter(req, length)
                if end is not None:
                    self._leave(end[1])
        # A split stays when what it was made for has gone: many of them cost more than a new tree.
        if len(self) > 3 * len(waiting) + 64:
            self._tree.clear()
            for req, (length, _) in ends.items():
                self._enter(req, length)

    def depth_first(self, waiting: Sequence[Req]) -> list[int]:
        """Return indices into `waiting`, which are those that were placed: heaviest branch first, and of equals the one
        whose first request came first. Those that end at a node follow those below it; those without a match are last.
        """
        unmatched: list[int] = []
        nodes = list(self._tree.nodes())
        roots = list(self._tree.roots().values())
        for node in nodes:
            data = node.data
            data.weight, data.first, data.here = 0, len(waiting), []
        ends = self._ends
        for index, req in enumerate(waiting):
            end = ends[req][1]
            (unmatched if end is None else end.data.here).append(index)
        for node in reversed(nodes):
            data, parent = node.data, node.parent
            if data.here:
                data.weight += len(data.here)
                data.first = min(data.first, data.here[0])
            if parent is not None:
                above = parent.data
                above.weight += data.weight
                above.first = min(above.first, data.first)
        order: list[int] = []
        stack = _lightest_first([node for root in roots for node in root.children.values()])
        opened: set[Node] = set()
        while stack:
            node = stack[-1]
            if not node.children or node in opened:
                order += node.data.here
                stack.pop()
            else:
                opened.add(node)
                stack += _lightest_first(list(node.children.values()))
        return order + unmatched

    def _enter(self, req: Req, length: int) -> None:
        node = None
        if length:
            key = req.key(length)
            node = self._tree.insert(key.tokens, Branch(), key.namespace)
        if node is not None:
            node.data.ending += 1
        self._ends[req] = (length, node)

    def _leave(self, node: Node | None) -> None:
        """One request fewer ends here; what is no longer needed is taken out."""
        if node is None:
            return
        node.data.ending -= 1
        while node.parent is not None and not node.children and not node.data.ending:
            leaf, node = node, node.parent
            self._tree.remove(leaf)


def _split(data: Branch, at: int) -> tuple[Branch, Branch]:
    """Divide a branch: requests that end at the node end at its lower half, once it is split."""
    return Branch(), data


def _lightest_first(nodes: list[Node]) -> list[Node]:
    """For a stack, whose end is taken first."""
    if len(nodes) > 1:
        nodes.sort(key=_lightness)
    return nodes


def _lightness(node: Node) -> tuple[int, int]:
    return node.data.weight, -node.data.first
