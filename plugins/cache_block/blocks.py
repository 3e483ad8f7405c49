"""The cached blocks: a hash chain over full pages, kept in flat arrays that are indexed by page."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from pegboard.toolkit.cache.block_keys import DIGEST_SIZE, ChainDigests, chain, sha256

if TYPE_CHECKING:
    from numpy.typing import NDArray

FIRST_LOOK = 16
NO_PAGES = np.empty(0, dtype=np.int64)


class BlockTable:
    """Finds the page that holds the KV of a block of tokens after a given chain of blocks.

    A block's digest is SHA-256 over its predecessor's digest and its own tokens; the first one's predecessor is the
    digest of the namespace (the scheme of vLLM's prefix caching). Digests alone never decide: a block is found only if
    its tokens and its predecessor's page are equal too. What rests on the digest, and so on its collision resistance,
    is that namespaces stay apart. Two blocks of one digest would merely not both be cached.

    Each page also remembers which page followed it last. So a chain that is followed again is compared in
    bulk, and hashing is left for its first block, for forks, and for new blocks. What is hashed for a request, or read
    from its pages on the way, goes into its `ChainDigests`: no block is hashed twice for one request, whenever it is
    matched, inserted, evicted and inserted again.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.live = np.zeros(num_pages + 1, dtype=np.bool_)
        self.parent = np.zeros(num_pages + 1, dtype=np.int64)
        self.generation = np.zeros(num_pages + 1, dtype=np.int64)
        self.tokens = np.zeros((num_pages + 1, page_size), dtype=np.int64)
        self.digests = np.zeros((num_pages + 1, DIGEST_SIZE), dtype=np.uint8)
        self.index: dict[bytes, int] = {}
        self._successor = np.zeros(num_pages + 1, dtype=np.int64)
        self._next = self._successor.data

    def __len__(self) -> int:
        return len(self.index)

    @staticmethod
    def digest(data: bytes) -> bytes:
        return sha256(data)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def root(namespace: str) -> bytes:
        """Return what stands for the predecessor of a namespace's first blocks."""
        return sha256(b"namespace:" + namespace.encode("utf-8", "surrogatepass"))

    def find(
        self,
        blocks: NDArray[np.int64],
        namespace: str,
        memo: ChainDigests | None = None,
        after: NDArray[np.int64] = NO_PAGES,
    ) -> NDArray[np.int64]:
        """Return pages int64 [m] of the longest cached chain that `blocks` int64 [n, page_size] begin with, or that
        they continue `after` a chain of pages that is known to hold the sequence's first ones.

        `memo` is the whole sequence's.
        """
        found: list[int] = []
        last = int(after[-1]) if after.size else 0
        while len(found) < blocks.shape[0]:
            block = blocks[len(found)]
            place = after.shape[0] + len(found)
            if memo is not None and place < len(memo):
                digest = memo[place]
            else:
                digest = self.digest(self._before(last, namespace) + block.tobytes())
                if memo is not None:
                    self._recall(memo, after, found)
                    memo.note(place, digest)
            page = self.index.get(digest, 0)
            if not page or self.parent[page] != last or (self.tokens[page] != block).any():
                break
            found.append(page)
            self._follow(page, blocks, found)
            last = found[-1]
        return np.array(found, dtype=np.int64)

    def _before(self, last: int, namespace: str) -> bytes:
        """Return the digest that goes before that of a block after the page `last` (0 for the first block)."""
        return self.digests[last].tobytes() if last else self.root(namespace)

    def _recall(self, memo: ChainDigests, path: NDArray[np.int64], found: list[int] | None = None) -> None:
        """Note the digests of a sequence's pages: those of `path`, then those `found` after it."""
        for start, pages in ((0, path), (path.shape[0], found or [])):
            known = max(0, len(memo) - start)
            if known < len(pages):
                memo.note(start + known, self.digests[pages[known:]].tobytes())

    def _follow(self, page: int, blocks: NDArray[np.int64], found: list[int]) -> None:
        """Extend `found`, which ends with `page`, along the remembered successors, for as long as their tokens fit."""
        look = FIRST_LOOK
        while len(found) < blocks.shape[0]:
            chain: list[int] = []
            limit = min(look, blocks.shape[0] - len(found))
            while len(chain) < limit and (page := self._next[page]):
                chain.append(page)
            wanted = blocks[len(found) : len(found) + len(chain)]
            differs = (self.tokens[chain] != wanted).reshape(-1)
            first = int(differs.argmax()) if chain else 0
            if chain and differs[first]:
                found += chain[: first // blocks.shape[1]]
                return
            found += chain
            if len(chain) < limit:
                return
            look *= 4

    def add(
        self,
        pages: NDArray[np.int64],
        blocks: NDArray[np.int64],
        path: NDArray[np.int64],
        namespace: str,
        memo: ChainDigests | None = None,
    ) -> NDArray[np.int64]:
        """Enter new `blocks` int64 [n, page_size], held by `pages` int64 [n], as a chain after the known `path`.

        Returns the pages entered, a copy. Where a digest is taken already the chain ends early. `memo` is the whole
        sequence's.
        """
        last = int(path[-1]) if path.size else 0
        if memo is not None:
            self._recall(memo, path)
        digests = self._chain(self._before(last, namespace), blocks, memo, path.shape[0])
        new = pages[: self._enter(digests, pages.tolist())].copy()
        joined = b"".join(digests)
        if memo is not None:
            memo.note(path.shape[0], joined)
        if new.size:
            self.live[new] = True
            self.parent[new[0]] = last
            self.parent[new[1:]] = new[:-1]
            self.tokens[new] = blocks[: new.shape[0]]
            self.digests[new] = np.frombuffer(joined, dtype=np.uint8).reshape(-1, DIGEST_SIZE)[: new.shape[0]]
            self._successor[new] = 0
        return new

    def _chain(self, before: bytes, blocks: NDArray[np.int64], memo: ChainDigests | None, place: int) -> list[bytes]:
        """Return the digests of blocks after one whose digest is `before`, the first being the sequence's
        `place`-th.
        """
        known = [] if memo is None else memo.between(place, place + blocks.shape[0])
        return known + chain(known[-1] if known else before, blocks[len(known) :], self.digest)

    def _enter(self, digests: list[bytes], pages: list[int]) -> int:
        """Put digests into the index, up to the first that is taken; how many are in."""
        setdefault = self.index.setdefault
        for count, (digest, page) in enumerate(zip(digests, pages, strict=True)):
            if setdefault(digest, page) != page:
                return count
        return len(digests)

    def remember(self, path: NDArray[np.int64]) -> None:
        """Along this path things went last."""
        self._successor[path[:-1]] = path[1:]

    def remove(self, pages: NDArray[np.int64]) -> None:
        """Forget blocks whose successors are gone or go along."""
        for digest in self.digests[pages]:
            del self.index[digest.tobytes()]
        parents = self.parent[pages]
        stale = self._successor[parents] == pages
        self._successor[parents[stale]] = 0
        self.live[pages] = False
        self.generation[pages] += 1

    def check(self) -> None:
        """Verify index and chains; raises AssertionError. O(pages)."""
        pages = np.flatnonzero(self.live)
        assert pages.shape[0] == len(self.index), f"{pages.shape[0]} blocks live, but {len(self.index)} are indexed"
        for page in pages.tolist():
            digest, parent = self.digests[page].tobytes(), int(self.parent[page])
            assert self.index.get(digest) == page, f"block {page} is indexed as {self.index.get(digest)}"
            if parent:
                assert self.live[parent], f"block {page} outlives its predecessor {parent}"
                expected = self.digest(self.digests[parent].tobytes() + self.tokens[page].tobytes())
                assert digest == expected, f"block {page} has a wrong digest"
            after = self._next[page]
            assert not after or (self.live[after] and self.parent[after] == page), f"{after} does not follow {page}"
