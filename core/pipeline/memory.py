"""MemoryManager: the only stage that moves pages between allocator, cache and requests.

At any time free + cached + held = all: free pages are the allocator's, cached ones the prefix cache's, and each
request holds those of its row after `kv.cache_len`. A request's row always lists whole pages, so `kv.allocated_len`
is a multiple of the page size, and a decode step needs a page only when its length reaches `allocated_len`.

Requests that decode together would get pages in turn, and each one's would lie scattered. So while less than half of
the memory is taken, a request gets some pages at once (`run`), which an allocator hands out as neighbours where it can:
on a CPU attention reads memory that lies together in a good deal less time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.req import NO_ROW, ReqKV
from pegboard.core.pipeline.guards import GuardedCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixMatch
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.token_allocator import TokenAllocator
    from pegboard.core.pipeline.running import RunningBatch
    from pegboard.toolkit.cache.req_to_token import ReqToTokenPool


RUN = 16
"""Tokens that running requests get at once: as many as attention reads together on a CPU."""


class MemoryCorrupted(RuntimeError):
    """The books no longer say whom a page belongs to. The process cannot go on, and starts anew."""


class MemoryManager:
    """Slots for requests: match, allocate, evict, commit to the cache, release.

    `run` is how many tokens a running request gets at once while memory is plentiful; 1: no more than it needs.
    """

    def __init__(self, rows: ReqToTokenPool, allocator: TokenAllocator, cache: PrefixCache, *, run: int = RUN) -> None:
        self.rows = rows
        self.allocator = allocator
        self.cache = cache
        self.page_size = allocator.page_size
        self.pages_at_once = max(1, run // self.page_size)
        self.held_tokens = 0
        """Tokens in pages that requests hold themselves."""
        self.unplaced: Callable[[Req], None] | None = None
        """Told when its memory is taken from a request; where stages listen."""
        self.guarded = GuardedCache(cache)

    @property
    def available_tokens(self) -> int:
        """What could be allocated right now: free pages and those that eviction would free."""
        return self.allocator.free_tokens + self.cache.evictable_tokens

    @property
    def total_tokens(self) -> int:
        return self.allocator.total_tokens

    def match(self, req: Req) -> PrefixMatch:
        """Find and lock the cached prefix of a request without a row. Undone by `unmatch`, completed by `place`."""
        found = self.guarded.match(req)
        n = len(found)
        known = n + found.promised
        req.kv = ReqKV(
            prefix_len=known, committed_len=n, scheduled_len=known, allocated_len=n, cache_len=n, handle=found.handle
        )
        return found

    def load(self, req: Req, found: PrefixMatch) -> bool:
        """Have what is promised of a placed request's prefix loaded into its own pages, with the step that reads them.
        False where that cannot be: the request is to be matched again.
        """
        if not found.promised:
            return True
        slots = self.rows.host[req.kv.row, len(found) : len(found) + found.promised]
        return self.guarded.load(req, slots.astype(np.int64))

    def loaded(self, kv: ReqKV, ok: bool) -> None:
        """Tell the cache that a request's load is through, or was for nothing."""
        load, kv.load = kv.load, None
        if load is not None:
            self.guarded.loaded(load, ok)

    def unmatch(self, req: Req) -> None:
        """Let go of a locked prefix: of a request that was not admitted after all, or that ends."""
        if req.kv.handle is not None:
            self.guarded.unlock(req.kv.handle, req)
        req.kv = ReqKV()

    def place(self, req: Req, found: PrefixMatch) -> None:
        """Give a matched request a row that starts with its cached prefix."""
        req.kv.row = self.rows.alloc()
        self.rows.write(req.kv.row, 0, found.slots)

    def extend(self, req: Req, length: int) -> bool:
        """Make room for `length` tokens of a placed request. False, with nothing changed, when memory does not
        suffice.
        """
        kv = req.kv
        missing = -(-(length - kv.allocated_len) // self.page_size)
        if missing <= 0:
            return True
        pages = self._alloc(missing)
        if pages is None:
            return False
        slots = (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
        self.rows.write(kv.row, kv.allocated_len, slots)
        kv.allocated_len += slots.shape[0]
        self.held_tokens += slots.shape[0]
        return True

    def extend_running(self, running: RunningBatch) -> bool:
        """Room for all tokens of each request that may go on, the next one included; False, with nothing changed, when
        memory does not suffice.
        """
        full = np.flatnonzero((running.known_lens > running.allocated) & (running.left > 0))
        count = full.shape[0]
        if not count:
            return True
        rows, starts, size = running.rows[full], running.allocated[full], self.page_size
        each = np.full(count, self._pages_each(count, int(starts.max())))
        if running.uneven:
            each = np.maximum(each, -(-(running.known_lens[full] - starts) // size))
        total = int(each.sum())
        pages = self._alloc(total)
        if pages is None:
            return False
        if total > count:
            within = np.arange(total) - np.repeat(np.cumsum(each) - each, each)
            rows, starts = np.repeat(rows, each), np.repeat(starts, each) + within * size
        self.rows.write_pages(rows, starts, pages, size)
        running.allocated[full] += each * size
        for place, more in zip(full.tolist(), (each * size).tolist(), strict=True):
            running.reqs[place].kv.allocated_len += more
        self.held_tokens += total * size
        return True

    def wish(self, running: RunningBatch, place: int, length: int) -> int:
        """Make room for `length` tokens of a running request if memory allows, and return how many it has room for."""
        req = running.reqs[place]
        self.extend(req, min(length, self.rows.width))
        running.allocated[place] = req.kv.allocated_len
        return req.kv.allocated_len

    def trim(self, running: RunningBatch) -> bool:
        """Take back pages that running requests do not need for their next token; whether there were any."""
        size = self.page_size
        needed = -(-running.known_lens // size) * size
        ahead = np.flatnonzero(running.allocated > needed)
        for place, stop in zip(ahead.tolist(), needed[ahead].tolist(), strict=True):
            kv = running.reqs[place].kv
            pages = self.rows.host[kv.row, stop : kv.allocated_len : size].astype(np.int64) // size
            self.allocator.free(pages)
            self.held_tokens -= kv.allocated_len - stop
            kv.allocated_len = stop
        running.allocated[ahead] = needed[ahead]
        return bool(ahead.shape[0])

    def cache_unfinished(self, req: Req) -> None:
        """Share what is computed so far; the request goes on with the canonical slots, locked."""
        self._insert(req)

    def release(self, req: Req, *, keep: bool = True) -> None:
        """Take everything back from a request: its KV goes to the cache (unless `keep` is False, where it may be
        wrong), its own pages to the allocator, its row to the pool."""
        kv = req.kv
        self.loaded(kv, False)
        if kv.row == NO_ROW:
            self.unmatch(req)
            return
        if self.unplaced is not None:
            self.unplaced(req)
        if keep and kv.committed_len > kv.cache_len:
            self._insert(req)
        own = self.rows.host[kv.row, kv.cache_len : kv.allocated_len : self.page_size]
        if own.shape[0]:
            self.allocator.free(own.astype(np.int64) // self.page_size)
            self.held_tokens -= own.shape[0] * self.page_size
        self.rows.free(kv.row)
        self.unmatch(req)

    def available_without(self, reqs: Sequence[Req]) -> list[int]:
        """`available_tokens` if the first 1, 2, ... of these requests were released. Nothing has changed afterwards.

        What a request shares is free only once all who share it are gone, and that only the cache can tell: so their
        prefixes are unlocked for a look, and locked again before anything could be evicted.
        """
        found, unlocked, own = [], [], 0
        try:
            for req in reqs:
                own += req.kv.allocated_len - req.kv.cache_len
                if req.kv.handle is not None:
                    self.cache.unlock(req.kv.handle)
                    unlocked.append(req.kv.handle)
                found.append(self.available_tokens + own)
        finally:
            for handle in unlocked:
                self.cache.lock(handle)
        return found

    def books_error(self) -> str | None:
        """Return None when free + cached + held = all, or what is wrong with it."""
        free, cached, total = self.allocator.free_tokens, self.cache.cached_tokens, self.total_tokens
        if free + cached + self.held_tokens != total:
            return f"free {free} + cached {cached} + held {self.held_tokens} tokens are not all {total}"
        return None

    def idle_error(self) -> str | None:
        """As `books_error`, for an engine without requests: nothing may be held or locked, and every row must be
        free.
        """
        if error := self.books_error():
            return error
        if self.held_tokens or self.cache.locked_tokens or self.rows.free_rows != self.rows.max_rows:
            taken = self.rows.max_rows - self.rows.free_rows
            return f"idle, yet {self.held_tokens} tokens held, {self.cache.locked_tokens} locked, {taken} rows taken"
        return None

    def _pages_each(self, count: int, longest: int) -> int:
        """For each of `count` running requests, the longest of which has `longest` slots."""
        each, size = self.pages_at_once, self.page_size
        if each == 1 or longest + each * size > self.rows.width:
            return 1
        return each if self.available_tokens - count * each * size > self.total_tokens // 2 else 1

    def _insert(self, req: Req) -> None:
        kv = req.kv
        known, key = kv.cache_len, req.key(kv.committed_len)
        given = self.rows.host[kv.row, known : kv.committed_len].astype(np.int64)
        before = self._owned()
        try:
            if kv.handle is None:
                result = self.cache.insert(key, given, priority=req.priority)
            else:
                result = self.cache.extend(kv.handle, key, given, priority=req.priority)
        except Exception as error:
            if self._owned() != before:
                raise MemoryCorrupted("the prefix cache failed amid an insert, and pages changed hands") from error
            self.guarded.failed("insert", f" {req}; its KV is not shared")
            return
        self.cache.lock(result.handle)
        if kv.handle is not None:
            self.cache.unlock(kv.handle)
        kv.handle = result.handle
        changed = np.flatnonzero(result.slots[: result.taken] != given[: result.taken])
        if changed.shape[0]:
            start = int(changed[0])
            self.rows.write(kv.row, known + start, result.slots[start : result.taken])
        self.held_tokens -= result.taken
        kv.cache_len = known + result.taken

    def _owned(self) -> tuple[int, int]:
        return self.allocator.free_tokens, self.cache.cached_tokens

    def _alloc(self, pages: int) -> NDArray[np.int64] | None:
        if pages > self.allocator.free_pages:
            short = (pages - self.allocator.free_pages) * self.page_size
            if short > self.cache.evictable_tokens:
                return None
            try:
                self.cache.evict(short)
            except Exception as error:
                self.guarded.failed("evict")
                if wrong := self.books_error():
                    raise MemoryCorrupted(f"the prefix cache failed amid an eviction: {wrong}") from error
        return self.allocator.alloc(pages)
