"""Contract: the prefix cache.

Ownership. Free pages belong to the allocator, cached pages to the cache, all others to the requests that hold them:
free + cached + held = all, with no page counted twice. A cache's pages are *locked* while a handle above them is
locked, and *evictable* otherwise. A cache speaks of slots (numpy int64, ``page * page_size + offset``) and deals in
whole pages. Page 0 belongs to none of them.

Keys. A page is found after exactly the tokens that it was computed after, in their namespace, and after no others:
a request that got another prompt's KV would read what another client wrote. A cache compares the tokens themselves, or
a digest of 128 bits or more that covers all of them and the namespace; sums, `hash()`, CRCs and shortened digests
collide.

Arrays. The caller's tokens and slots are buffers that are used again: a cache copies what it keeps and writes into
neither, and what it answers with is the caller's.

Promises (capability `host_tier`). A cache may keep prefixes elsewhere, beyond the device's pages. How, and what of
them, is the cache's own affair: it has what other plugins lend it (`PrefixCacheContext.services`), and takes the
results of what it has begun in `poll`. A match then goes on with tokens that the cache promises. The caller has pages
of its own filled with them (`load`), by the device part that the cache names, along with the step that reads them. What
was loaded counts as computed: it is the caller's until it inserts it, like what it computes after it. All counters
speak of device pages; evicting waits for nothing.

Growth. What a cache knows of a page, a handle or a namespace goes when the page goes. To evict costs, per call, at most
one look at everything, and not one for each page: where memory is short, every step evicts.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.options import Component, OptionsT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.keys import PrefixKey
    from pegboard.core.interfaces.token_allocator import TokenAllocator


class CacheHandle(Protocol):
    """Opaque to all but the cache that made it: the end of a cached path, with everything before it."""


@dataclass(frozen=True, slots=True)
class PrefixCacheContext:
    """What a prefix cache is built from: the allocator that takes back its pages, and the page size in tokens.

    `services` are objects that plugins have built for it, by name (the hook `memory_services`).
    """

    allocator: TokenAllocator
    page_size: int
    services: Mapping[str, object] = field(default_factory=dict)
    clock: Clock = time.monotonic


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """`slots` int64 [matched] in token order, a copy that the caller may keep; valid only while `handle` is locked.

    `promised` more tokens, in whole pages, can be loaded after these; `promised_from` says how many of them come from
    where, by names of `PrefixCache.origins`. `arriving`: another caller is having the first of them loaded just now, so
    they are on the device soon.
    """

    slots: NDArray[np.int64]
    handle: CacheHandle
    promised: int = 0
    promised_from: Mapping[str, int] = field(default_factory=dict)
    arriving: bool = False

    def __len__(self) -> int:
        return int(self.slots.shape[0])


@dataclass(frozen=True, slots=True)
class InsertResult:
    """`slots` int64 [given] are the canonical slots, which the caller writes into its row: the first `taken` (whole
    pages) belong to the cache from now on, the rest stays the caller's. `handle` covers the taken part and is not
    locked yet.
    """

    slots: NDArray[np.int64]
    taken: int
    handle: CacheHandle


@dataclass(frozen=True, slots=True)
class CachedRun:
    """Tokens [start, start + tokens) of all cached prefixes that have them, for operators. `on_device` of them have
    pages there; `locked`: whether any lock holds these. `above` is the index of the nearest run before them in the same
    answer, -1 for none. `hits` counts the matches that found them.
    """

    start: int
    tokens: int
    on_device: int
    above: int
    hits: int
    locked: bool


class PrefixCache(Component[OptionsT, PrefixCacheContext]):
    """Finds, locks, keeps and evicts the KV of shared prefixes. Not thread-safe: one scheduler calls it."""

    origins: tuple[str, ...] = ()
    """Where promised tokens come from, for figures; none for a cache that promises nothing."""
    loader: str = ""
    """The name of the DevicePart that loads what it promises: its payload is a tuple of what `load` has returned."""

    def __init__(self, options: OptionsT, ctx: PrefixCacheContext) -> None:
        super().__init__(options, ctx)
        self.allocator = ctx.allocator
        self.page_size = ctx.page_size
        self.version = 0
        """Grows with each change of what `match` could answer, and only then: for those who remember a match."""

    @abc.abstractmethod
    def match(self, key: PrefixKey) -> PrefixMatch:
        """Longest cached prefix of `key`, in whole pages; of length 0 on a miss, never an error.

        Touches the entries' recency; changes no page's owner. It may split a node.
        """

    def matched_length(self, key: PrefixKey) -> int:
        """Return how many tokens `match` would find, promised ones included, for policies. Touches what `match`
        touches, and no more than that. This default calls it; a cache that can count without collecting slots overrides
        it.
        """
        found = self.match(key)
        return len(found) + found.promised

    @abc.abstractmethod
    def lock(self, handle: CacheHandle) -> None:
        """Keep the handle's whole path from being evicted, and what its match promised. Locks count: each needs its
        own `unlock`.

        Raises ValueError, with nothing changed, where any of the path was evicted or reset since the handle was made,
        even if the same tokens were inserted again: the caller has slots that are another request's by now.
        """

    @abc.abstractmethod
    def unlock(self, handle: CacheHandle) -> None:
        """Undo one `lock` of this handle. Raises ValueError, with nothing changed, where this very handle is not
        locked.
        """

    @abc.abstractmethod
    def insert(self, key: PrefixKey, slots: NDArray[np.int64], *, priority: int = 0) -> InsertResult:
        """Hand the KV of `key` (slots int64 [len(key)]) to the cache, as whole pages.

        Pages that the cache already has for the same tokens are duplicates: the cache frees the caller's (unless they
        are the very same pages) and answers with its own. The partial tail stays with the caller. The caller locks the
        returned handle before it unlocks the one it held, so nothing is lost in between.

        Raises ValueError, with nothing changed, where lengths differ, where the slots are not whole pages in their
        order, for a page outside of the pool (1 to `num_pages`), and for a page that is cached for other tokens
        already: it would be freed twice.
        """

    def extend(
        self, handle: CacheHandle, key: PrefixKey, slots: NDArray[np.int64], *, priority: int = 0
    ) -> InsertResult:
        """`insert` for a caller whose row begins with the path of `handle`, which it has locked; `slots` int64 [given]
        are only those of the rest, the last tokens of `key`.

        So a long prompt that comes in chunks need not be walked from its start each time. Duplicates, tail and handle
        are as with `insert`: the result's `slots` and `taken` speak of the rest, its handle covers the whole. Raises
        ValueError where path and rest do not reach the key's length, and where `insert` does. This default matches the
        path again; a cache that can go on from a handle overrides it.
        """
        known = len(key) - int(slots.shape[0])
        path = self.match(key.head(max(0, known)))
        if len(path) != known:
            raise ValueError(f"{len(key)} tokens, but a path of {len(path)} and slots {list(slots.shape)}")
        result = self.insert(key, np.concatenate((path.slots, slots)), priority=priority)
        return InsertResult(result.slots[known:], result.taken - known, result.handle)

    @abc.abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Give at least `num_tokens` tokens' worth of unlocked pages back to the allocator, fewer only if there are
        no more.

        Returns the number of tokens freed (a multiple of the page size). Leaves before their parents, in the order of
        the cache's eviction policy.
        """

    @property
    @abc.abstractmethod
    def evictable_tokens(self) -> int:
        """Tokens in cached, unlocked pages."""

    @property
    @abc.abstractmethod
    def locked_tokens(self) -> int:
        """Tokens in cached, locked pages."""

    @property
    def cached_tokens(self) -> int:
        """All tokens that belong to the cache."""
        return self.evictable_tokens + self.locked_tokens

    @abc.abstractmethod
    def reset(self) -> None:
        """Give all cached pages back; those that requests hold and have not inserted are none of its business.

        Raises RuntimeError while something is locked; then nothing has changed. Handles from before are as after an
        eviction.
        """

    # ---- promises -------------------------------------------------------------------------------------------------

    def load(self, handle: CacheHandle, slots: NDArray[np.int64]) -> object:
        """Have the tokens that the match of a locked handle promised loaded into the slots int64 [promised], whole
        pages that the caller holds and goes on to hold. Return what tells the device part `loader` to do so: plain
        values and arrays.

        What is loaded stays as it is until `loaded`, even where the path is unlocked before. Raises ValueError, with
        nothing changed, for a handle that is not locked, and for another number of slots; Unsupported for a cache that
        promises nothing.
        """
        raise Unsupported(f"the prefix cache {type(self).__name__}", "host_tier")

    def loaded(self, load: object, ok: bool) -> None:  # nothing to do without loads
        """Learn that a load is through, and whether the pages have what they should. To be called once for each load,
        also where it never began. Raises ValueError for a load that is not under way.
        """

    def prepare(self, seconds: float) -> tuple[int, int]:
        """Have the system provide the memory of what it keeps elsewhere, for about `seconds` at most. Return the tokens
        that it is there for, and all. Called before the first request, or not at all.
        """
        return 0, 0

    def poll(self) -> None:  # nothing to do without jobs
        """Take results of moves that ended, and begin others: between steps while `busy`. Costs nearly nothing without
        news.
        """

    @property
    def busy(self) -> bool:
        """Whether moves are under way whose results `poll` takes."""
        return False

    def stats(self) -> Mapping[str, float]:
        """Return what an operator may want to know, by name: counters that only grow end in `_total`."""
        return {}

    def describe(self, most: int) -> Sequence[CachedRun]:
        """Return the largest runs of cached tokens, `most` at most, the largest first. Changes nothing, and takes some
        milliseconds at most: of a large cache it looks at a part. Tells neither tokens nor namespaces, which are
        clients'. This default tells nothing.
        """
        return ()

    def close(self) -> None:  # nothing to close without jobs
        """End what is under way, and let go of all that it keeps elsewhere. No step is under way, and none comes."""

    # ---- tests ----------------------------------------------------------------------------------------------------

    def check(self) -> None:  # optional self-check, empty by default
        """Verify the internal books; raises AssertionError with a description. For tests and the idle check."""
