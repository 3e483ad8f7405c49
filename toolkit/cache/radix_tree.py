"""A radix tree over token sequences, in whole pages, with a payload at every node.

A node holds a run of tokens as one numpy array, and a run is split only where sequences diverge. So following a
sequence costs one vectorised comparison per node and not one step per token. After the path-compressed trie (Morrison,
"PATRICIA", 1968) and its use for KV caches in SGLang (Zheng et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")


class RadixNode(Generic[T]):
    """A run of tokens, [start, end) of every sequence that passes through it, and the user's `data`.

    Only the tree changes the links and tokens; `data` is the user's. `children` are keyed by their first page's bytes.
    """

    __slots__ = ("children", "data", "parent", "start", "tokens")

    def __init__(self, parent: RadixNode[T] | None, start: int, tokens: NDArray[np.int64], data: T) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.data = data
        self.children: dict[bytes, RadixNode[T]] = {}

    def __len__(self) -> int:
        """Return how many tokens the node itself holds."""
        return int(self.tokens.shape[0])

    def __bool__(self) -> bool:
        return True

    @property
    def end(self) -> int:
        """How many tokens lead from the root to the node's end."""
        return self.start + int(self.tokens.shape[0])

    @property
    def attached(self) -> bool:
        """Whether it is still in the tree. A root counts as attached."""
        return self.parent is not None

    def ancestry(self) -> Iterator[RadixNode[T]]:
        """Yield the node, its parent and so on; the root is left out."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.start}..{self.end}, {len(self.children)} children, {self.data!r})"


class RadixRoot(RadixNode[T]):
    """The empty run that a namespace's sequences start from."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str, data: T) -> None:
        super().__init__(None, 0, np.empty(0, dtype=np.int64), data)
        self.namespace = namespace

    @property
    def attached(self) -> bool:
        return True


class RadixPath(Generic[T]):
    """How far a sequence leads into the tree: its first `length` tokens, along `nodes` (root left out, and what comes
    before the node that it was searched from).

    The last node may be covered in part (`whole` is False then) until `RadixTree.cut` splits it. A path is valid until
    the tree changes otherwise.
    """

    __slots__ = ("length", "namespace", "nodes")

    def __init__(self, namespace: str, nodes: list[RadixNode[T]], length: int) -> None:
        self.namespace = namespace
        self.nodes = nodes
        self.length = length

    @property
    def node(self) -> RadixNode[T] | None:
        """The node in which the path ends; None where nothing matched."""
        return self.nodes[-1] if self.nodes else None

    @property
    def whole(self) -> bool:
        """Whether the path ends where its last node ends."""
        return not self.nodes or self.nodes[-1].end == self.length


def share(data: T, at: int) -> tuple[T, T]:
    """Return the default for splitting a payload: both halves have the same one."""
    return data, data


def shorten(array: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Return the first `length` items: as a view, or as a copy once a view would keep more than twice its size
    alive.
    """
    kept = array[:length]
    owner = kept.base
    wasteful = isinstance(owner, np.ndarray) and owner.size > 2 * length
    return kept.copy() if wasteful else kept


class RadixTree(Generic[T]):
    """Sequences of int64 tokens under namespaces that share nothing, in multiples of `page_size`.

    `make_root` makes the payload of a namespace's root. `split(data, at)` divides a payload when its node is split
    after `at` tokens and returns (upper, lower); the existing node object stays the lower half, so a reference to
    a node keeps meaning the same whole sequence. Tokens are copied in. Not thread-safe.

    >>> tree = RadixTree(page_size=2, make_root=str)
    >>> _ = tree.insert(np.array([1, 2, 3, 4, 5]), "first")       # the token 5 fills no page
    >>> _ = tree.insert(np.array([1, 2, 9, 9]), "second")         # splits after [1, 2]
    >>> path = tree.find(np.array([1, 2, 3, 4, 7, 7]))
    >>> path.length, [node.tokens.tolist() for node in path.nodes]
    (4, [[1, 2], [3, 4]])
    """

    def __init__(
        self,
        page_size: int = 1,
        *,
        make_root: Callable[[], T],
        split: Callable[[T, int], tuple[T, T]] = share,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self.num_nodes = 0
        self.num_tokens = 0
        self._make_root = make_root
        self._split_data = split
        self._roots: dict[str, RadixRoot[T]] = {}

    def find(self, tokens: NDArray[np.int64], namespace: str = "", after: RadixNode[T] | None = None) -> RadixPath[T]:
        """Longest path that `tokens` int64 [n] share with the tree, in whole pages. Changes nothing.

        With `after`, a node of the namespace to whose end the tokens are known to lead, the search goes on from there
        and the path begins with that node. Raises ValueError where there are fewer tokens.
        """
        nodes = [] if after is None else [after]
        length = 0 if after is None else after.end
        node = self._roots.get(namespace) if after is None else after
        if node is None:
            return RadixPath(namespace, nodes, 0)
        tokens = np.ascontiguousarray(tokens, dtype=np.int64)
        page, total = self.page_size, self.aligned(tokens.shape[0])
        if total < length:
            raise ValueError(f"{total} tokens in whole pages do not lead to {after!r}")
        while length < total:
            node = node.children.get(tokens[length : length + page].tobytes())
            if node is None:
                break
            nodes.append(node)
            common = self._common(node.tokens, tokens[length:total])
            length += common
            if common < node.tokens.shape[0]:
                break
        return RadixPath(namespace, nodes, length)

    def cut(self, path: RadixPath[T]) -> RadixNode[T] | None:
        """Split the path's last node so that a node ends where the path does; that node (None for an empty path).

        `path` is brought up to date.
        """
        if not path.whole:
            last = path.nodes[-1]
            path.nodes[-1] = self.split(last, path.length - last.start)
        return path.node

    def split(self, node: RadixNode[T], at: int) -> RadixNode[T]:
        """Divide a node after `at` of its tokens (whole pages); `node` becomes the child of the returned upper half."""
        if node.parent is None or at % self.page_size or not 0 < at < len(node):
            raise ValueError(f"cannot split {node!r} after {at} tokens")
        parent = node.parent
        upper_data, lower_data = self._split_data(node.data, at)
        upper = RadixNode(parent, node.start, node.tokens[:at].copy(), upper_data)
        parent.children[self._first(upper.tokens)] = upper
        node.parent, node.start, node.tokens, node.data = upper, node.start + at, node.tokens[at:].copy(), lower_data
        upper.children[self._first(node.tokens)] = node
        self.num_nodes += 1
        return upper

    def extend(self, path: RadixPath[T], tokens: NDArray[np.int64], data: T) -> RadixNode[T]:
        """Add the rest of `tokens` (those after `path.length`, in whole pages) as a leaf below a path found for them.

        Raises ValueError where no whole page is left or the path could be followed further.
        """
        rest = np.array(tokens[path.length : self.aligned(tokens.shape[0])], dtype=np.int64)
        if not rest.size:
            raise ValueError(f"no whole page of these {tokens.shape[0]} tokens lies beyond {path.length}")
        parent = self.cut(path) or self._root(path.namespace)
        first = self._first(rest)
        if first in parent.children:
            raise ValueError(f"these tokens can be followed beyond {path.length}: find their path first")
        leaf = RadixNode(parent, path.length, rest, data)
        parent.children[first] = leaf
        path.nodes.append(leaf)
        path.length = leaf.end
        self.num_nodes += 1
        self.num_tokens += len(leaf)
        return leaf

    def insert(self, tokens: NDArray[np.int64], data: T, namespace: str = "") -> RadixNode[T] | None:
        """Make sure that `tokens` are in the tree up to their last whole page, and return the node that ends there.

        None where they fill no page. `data` goes to the leaf that had to be added, and nowhere if none had to be.
        """
        path = self.find(tokens, namespace)
        if path.length < self.aligned(tokens.shape[0]):
            return self.extend(path, tokens, data)
        return self.cut(path)

    def trim(self, leaf: RadixNode[T], count: int) -> None:
        """Take the last `count` tokens (whole pages, not all) off a leaf. Its payload is the caller's to adapt."""
        if leaf.parent is None or leaf.children or count % self.page_size or not 0 < count < len(leaf):
            raise ValueError(f"cannot trim {leaf!r} by {count} tokens")
        leaf.tokens = shorten(leaf.tokens, len(leaf) - count)
        self.num_tokens -= count

    def remove(self, leaf: RadixNode[T]) -> None:
        """Take a leaf out; it is no longer attached. A namespace without nodes is forgotten."""
        parent = leaf.parent
        if parent is None or leaf.children:
            raise ValueError(f"cannot remove {leaf!r}: it is not a leaf of this tree")
        del parent.children[self._first(leaf.tokens)]
        leaf.parent = None
        self.num_nodes -= 1
        self.num_tokens -= len(leaf)
        if isinstance(parent, RadixRoot) and not parent.children:
            del self._roots[parent.namespace]

    def clear(self) -> None:
        """Forget everything. The nodes are detached, so that what still refers to one can tell."""
        for node in list(self.nodes()):
            node.parent = None
        self._roots.clear()
        self.num_nodes = self.num_tokens = 0

    def nodes(self) -> Iterator[RadixNode[T]]:
        """Yield all nodes but the roots, parents before their children."""
        stack: list[RadixNode[T]] = list(self._roots.values())
        while stack:
            node = stack.pop()
            if not isinstance(node, RadixRoot):
                yield node
            stack.extend(node.children.values())

    def roots(self) -> dict[str, RadixRoot[T]]:
        """Return the namespaces and their roots, a copy."""
        return dict(self._roots)

    def aligned(self, length: int) -> int:
        """`length` without the tokens that fill no page."""
        return length - length % self.page_size

    def check(self) -> None:
        """Verify all links, page borders and counters; raises AssertionError. O(nodes), for tests and idle checks."""
        count = tokens = 0
        for namespace, root in self._roots.items():
            assert root.namespace == namespace, f"root {root.namespace!r} is filed under {namespace!r}"
            assert root.children, f"namespace {namespace!r} is empty"
        for node in self.nodes():
            count += 1
            tokens += len(node)
            parent = node.parent
            assert parent is not None, f"{node!r} has no parent"
            assert parent.children.get(self._first(node.tokens)) is node, f"{node!r} is filed under a wrong key"
            assert node.start == parent.end, f"{node!r} does not start at its parent's end {parent.end}"
            assert len(node) > 0, f"{node!r} is empty"
            assert len(node) % self.page_size == 0, f"{node!r} holds part of a page"
        assert count == self.num_nodes, f"{count} nodes, but {self.num_nodes} counted"
        assert tokens == self.num_tokens, f"{tokens} tokens, but {self.num_tokens} counted"

    def _root(self, namespace: str) -> RadixRoot[T]:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = RadixRoot(namespace, self._make_root())
        return root

    def _first(self, tokens: NDArray[np.int64]) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _common(self, run: NDArray[np.int64], tokens: NDArray[np.int64]) -> int:
        """Length of the common prefix in whole pages."""
        length = min(run.shape[0], tokens.shape[0])
        differs = run[:length] != tokens[:length]
        first = int(differs.argmax()) if length else 0
        if length and differs[first]:
            length = first
        return self.aligned(length)
