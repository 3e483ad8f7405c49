"""The block cache: whole pages found by a chain of hashes, with reference counts and an LRU list of the unlocked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.prefix_cache import InsertResult, PrefixCache, PrefixMatch
from pegboard.plugins.cache_block.blocks import NO_PAGES, BlockTable
from pegboard.plugins.cache_block.lru import LinkedOrder
from pegboard.toolkit.cache.block_keys import ChainDigests
from pegboard.toolkit.cache.pages import pages_of, slots_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.keys import PrefixKey
    from pegboard.core.interfaces.prefix_cache import CacheHandle, PrefixCacheContext


class BlockHandle:
    """The pages of a path, the generation of its last one (which tells whether it was evicted since), and its locks."""

    __slots__ = ("generation", "locks", "pages")

    def __init__(self, pages: NDArray[np.int64], generation: int) -> None:
        self.pages = pages
        self.generation = generation
        self.locks = 0


class BlockCache(PrefixCache[NoOptions]):
    """Every call costs a few vectorised operations over the pages that it names; a victim costs O(1).

    The order of eviction is strictly least recently used. Whatever touches a block touches its predecessors too and
    makes them more recent, and a lock on a block locks them as well; so the list's old end never holds a block that
    another one continues, and a chain goes from its end. Request priorities make no difference here.
    """

    def __init__(self, options: NoOptions, ctx: PrefixCacheContext) -> None:
        super().__init__(options, ctx)
        pages = self.allocator.num_pages
        self._blocks = BlockTable(pages, self.page_size)
        self._idle = LinkedOrder(pages)
        self._refs = np.zeros(pages + 1, dtype=np.int64)
        self._locked = 0

    def matched_length(self, key: PrefixKey) -> int:
        path = self._blocks.find(self._split(key), key.namespace, self._memo(key))
        self._touch(path)
        return int(path.shape[0]) * self.page_size

    def match(self, key: PrefixKey) -> PrefixMatch:
        path = self._blocks.find(self._split(key), key.namespace, self._memo(key))
        self._touch(path)
        return PrefixMatch(slots_of(path, self.page_size), self._handle(path))

    def lock(self, handle: CacheHandle) -> None:
        held = self._checked(handle)
        if held.pages.size:
            if self._blocks.generation[held.pages[-1]] != held.generation:
                raise ValueError("cannot lock a prefix that has been evicted since it was matched: match it again")
            self._refs[held.pages] += 1
            newly = held.pages[self._refs[held.pages] == 1]
            self._idle.remove(newly)
            self._locked += newly.shape[0]
        held.locks += 1

    def unlock(self, handle: CacheHandle) -> None:
        held = self._checked(handle)
        if not held.locks:
            raise ValueError("this handle is not locked")
        held.locks -= 1
        self._refs[held.pages] -= 1
        idle = self._unlocked(held.pages)
        self._idle.push(idle)
        self._locked -= idle.shape[0]

    def insert(self, key: PrefixKey, slots: NDArray[np.int64], *, priority: int = 0) -> InsertResult:
        if slots.shape != (len(key),):
            raise ValueError(f"{len(key)} tokens, but slots {list(slots.shape)}")
        return self._insert(NO_PAGES, key, slots)

    def extend(
        self, handle: CacheHandle, key: PrefixKey, slots: NDArray[np.int64], *, priority: int = 0
    ) -> InsertResult:
        held = self._checked(handle)
        length = held.pages.shape[0] * self.page_size
        if not held.locks:
            raise ValueError("a path that is not locked cannot be extended")
        if slots.shape != (len(key) - length,):
            raise ValueError(f"{len(key)} tokens, but a path of {length} and slots {list(slots.shape)}")
        return self._insert(held.pages, key, slots)

    def _insert(self, before: NDArray[np.int64], key: PrefixKey, slots: NDArray[np.int64]) -> InsertResult:
        """Insert what follows the path `before`, which is locked; `slots` are those of the rest."""
        blocks = self._split(key)[before.shape[0] :]
        memo = self._memo(key)
        canonical = np.array(slots, dtype=np.int64)
        given = pages_of(canonical[: blocks.size], self.page_size)
        rest = self._blocks.find(blocks, key.namespace, memo, before)
        known = rest.shape[0]
        self._keep_cached(rest, given, canonical)
        self._take_out(rest)
        path = np.concatenate((before, rest))
        if known < blocks.shape[0]:
            new = self._blocks.add(given[known:], blocks[known:], path, key.namespace, memo)
            path = np.concatenate((path, new))
            self.version += 1
        self._put_back(path, before.shape[0])
        return InsertResult(canonical, (path.shape[0] - before.shape[0]) * self.page_size, self._handle(path))

    def evict(self, num_tokens: int) -> int:
        pages = self._idle.pop(-(-num_tokens // self.page_size))
        self._give_back(pages)
        return int(pages.shape[0]) * self.page_size

    @property
    def evictable_tokens(self) -> int:
        return (len(self._blocks) - self._locked) * self.page_size

    @property
    def locked_tokens(self) -> int:
        return self._locked * self.page_size

    def reset(self) -> None:
        if self._locked:
            raise RuntimeError(f"cannot reset: {self.locked_tokens} cached tokens are locked")
        self._give_back(self._idle.pop(len(self._blocks)))

    def check(self) -> None:
        self._blocks.check()
        idle = self._idle.pages()
        live = np.flatnonzero(self._blocks.live)
        refs = self._refs[live]
        assert not self._refs[~self._blocks.live].any(), "a page that is not cached is locked"
        assert (refs >= 0).all(), "a block has fewer than no locks"
        assert int((refs > 0).sum()) == self._locked, f"{(refs > 0).sum()} blocks locked, {self._locked} counted"
        assert sorted(idle) == live[refs == 0].tolist(), "the list does not hold exactly the unlocked blocks"
        place = {page: position for position, page in enumerate(idle)}
        for page in live.tolist():
            parent = int(self._blocks.parent[page])
            if parent:
                assert self._refs[parent] >= self._refs[page], (
                    f"block {page} is locked more often than {parent} before it"
                )
                assert place.get(parent, -1) < place.get(page, len(idle)), f"block {parent} would go before {page}"

    def _split(self, key: PrefixKey) -> NDArray[np.int64]:
        """Return the key's full blocks, int64 [n, page_size]."""
        whole = len(key) // self.page_size * self.page_size
        return np.ascontiguousarray(key.tokens[:whole], dtype=np.int64).reshape(-1, self.page_size)

    def _memo(self, key: PrefixKey) -> ChainDigests | None:
        """By namespace too, so that not even a memo in wrong hands carries a digest from one to another."""
        return None if key.memo is None else key.memo.of(("cache_block", self.page_size, key.namespace), ChainDigests)

    def _unlocked(self, path: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the unlocked blocks of a path: its end, as locks hold from the start on."""
        idle: NDArray[np.int64] = path[self._refs[path] == 0]
        return idle

    def _touch(self, path: NDArray[np.int64]) -> None:
        self._take_out(path)
        self._put_back(path)

    def _take_out(self, path: NDArray[np.int64]) -> None:
        self._idle.remove(self._unlocked(path))

    def _put_back(self, path: NDArray[np.int64], start: int = 0) -> None:
        """Make the path the most recent one, from its page `start` on."""
        self._idle.push(self._unlocked(path[start:]))
        self._blocks.remember(path[max(0, start - 1) :])

    def _keep_cached(self, path: NDArray[np.int64], given: NDArray[np.int64], canonical: NDArray[np.int64]) -> None:
        """Free those of the `given` pages that duplicate the path's, and write the path's slots into `canonical`.

        Raises ValueError, with nothing changed, for a page that does not exist or is cached for other tokens already.
        """
        if given.size and (given.min() < 1 or given.max() > self.allocator.num_pages):
            raise ValueError(f"slots outside of pages 1 to {self.allocator.num_pages} are inserted")
        known = path.shape[0]
        duplicates = given[:known][given[:known] != path]
        if self._blocks.live[duplicates].any() or self._blocks.live[given[known:]].any():
            raise ValueError("a page is inserted that the cache already holds for other tokens")
        if duplicates.size:
            self.allocator.free(duplicates)
            canonical[: known * self.page_size] = slots_of(path, self.page_size)

    def _give_back(self, pages: NDArray[np.int64]) -> None:
        if pages.size:
            self._blocks.remove(pages)
            self.allocator.free(pages)
            self.version += 1

    def _handle(self, path: NDArray[np.int64]) -> BlockHandle:
        return BlockHandle(path, int(self._blocks.generation[path[-1]]) if path.size else 0)

    def _checked(self, handle: CacheHandle) -> BlockHandle:
        if not isinstance(handle, BlockHandle):
            raise TypeError(f"this is not a handle of a block cache: {handle!r}")
        return handle
