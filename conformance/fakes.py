"""Stand-ins for suites and plugin authors: requests, a registry of given records, an allocator that keeps books."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.plugin import Plugin, Provider
from pegboard.core.interfaces.prefix_cache import InsertResult, PrefixCache, PrefixCacheContext, PrefixMatch
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.interfaces.token_allocator import TokenAllocator, TokenAllocatorContext
from pegboard.core.registry.registry import Registry
from pegboard.toolkit.system.lazy_names import import_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.keys import PrefixKey
    from pegboard.core.interfaces.prefix_cache import CacheHandle
    from pegboard.toolkit.system.lazy_names import import_name
from pegboard.core.registry.records import ProviderRecord


def make_req(
    rid: str = "r0",
    prompt: Iterable[int] = (1, 2, 3),
    output: Iterable[int] = (),
    *,
    status: ReqStatus | None = None,
    sampling: SamplingParams | None = None,
    **fields: Any,
) -> Req:
    """Return a request with a prompt and the tokens it has generated so far; `fields` go to Req (priority, seed...).

    Its status is waiting, or running where it has output, unless `status` says otherwise.
    """
    req = Req(rid, np.fromiter(prompt, dtype=np.int64), sampling or SamplingParams(), **fields)
    for token in output:
        req.tokens.append(token)
    req.status = status if status is not None else ReqStatus.RUNNING if req.output_len else ReqStatus.WAITING
    return req


def registry_of(
    *providers: Provider, plugin: str = "fake", distribution: str = "fake-distribution", version: str = "0"
) -> Registry:
    """Return a registry that discovers nothing and holds these providers, as one plugin of one distribution."""
    record = Plugin(name=plugin, version=version, providers=providers)
    return Registry.of(record, distribution=distribution, version=version)


@functools.cache
def _store_record() -> ProviderRecord:
    record = Registry.discover().get("session_store", "in_memory")
    assert record is not None, "the built-in session store is not installed"
    return record


def session_store(**options: Any) -> Any:
    """Return the built-in session store, with these options."""
    record = _store_record()
    context = import_name(f"{record.contract.interface.partition(':')[0]}:SessionStoreContext")()
    return record.load()(record.options_model()(**options), context)


class CountingAllocator(TokenAllocator):
    """An allocator that knows the owner of each page: the lowest free page first, strict about every `free`.

    `handed_out` and `taken_back` count pages. `held` is the set of pages that have an owner.
    """

    def __init__(self, num_pages: int = 64, page_size: int = 1) -> None:
        super().__init__(NoOptions(), TokenAllocatorContext(num_pages, page_size))
        self.reset()

    def reset(self) -> None:
        self.held: set[int] = set()
        self.handed_out = 0
        self.taken_back = 0

    @property
    def free_pages(self) -> int:
        return self.num_pages - len(self.held)

    def alloc(self, n: int) -> NDArray[np.int64] | None:
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > self.free_pages:
            return None
        pages = [page for page in range(1, self.num_pages + 1) if page not in self.held][:n]
        self.held.update(pages)
        self.handed_out += n
        return np.array(pages, dtype=np.int64)

    def free(self, pages: NDArray[np.int64]) -> None:
        given = pages.tolist()
        if len(set(given)) != len(given):
            raise ValueError(f"freed twice in one call: {sorted(given)}")
        strays = sorted(set(given) - self.held)
        if strays:
            raise ValueError(f"freed though they have no owner: pages {strays}")
        self.held.difference_update(given)
        self.taken_back += len(given)

    def alloc_slots(self, num_tokens: int) -> NDArray[np.int64]:
        """Return slots int64 [num_tokens] in as many pages as they need. Raises MemoryError where there are too few."""
        pages = self.alloc(-(-num_tokens // self.page_size))
        if pages is None:
            raise MemoryError(f"{num_tokens} tokens do not fit in {self.free_pages} pages of {self.page_size}")
        slots = pages[:, None] * self.page_size + np.arange(self.page_size, dtype=np.int64)
        return slots.reshape(-1)[:num_tokens]


class EmptyCache(PrefixCache):
    """A prefix cache that never has anything, for the context of a policy that must not care."""

    def __init__(self, page_size: int = 1, allocator: TokenAllocator | None = None) -> None:
        allocator = allocator if allocator is not None else CountingAllocator(page_size=page_size)
        super().__init__(NoOptions(), PrefixCacheContext(allocator, page_size))

    def match(self, key: PrefixKey) -> PrefixMatch:
        return PrefixMatch(np.empty(0, dtype=np.int64), _Nothing())

    def lock(self, handle: CacheHandle) -> None:
        assert isinstance(handle, _Nothing)
        handle.locks += 1

    def unlock(self, handle: CacheHandle) -> None:
        assert isinstance(handle, _Nothing)
        if not handle.locks:
            raise ValueError("this handle is not locked")
        handle.locks -= 1

    def insert(self, key: PrefixKey, slots: NDArray[np.int64], *, priority: int = 0) -> InsertResult:
        if len(key) != len(slots):
            raise ValueError(f"{len(key)} tokens, but {len(slots)} slots")
        return InsertResult(slots, 0, _Nothing())

    def evict(self, num_tokens: int) -> int:
        return 0

    @property
    def evictable_tokens(self) -> int:
        return 0

    @property
    def locked_tokens(self) -> int:
        return 0

    def reset(self) -> None:
        return


@dataclass(slots=True, eq=False)
class _Nothing:
    """The handle of an empty prefix."""

    locks: int = 0
