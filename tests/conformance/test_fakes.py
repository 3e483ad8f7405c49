"""The fakes keep the contracts that they stand in for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegboard.conformance.fakes import CountingAllocator, EmptyCache, make_req, registry_of
from pegboard.conformance.prefix_cache import PrefixCacheContract
from pegboard.conformance.token_allocator import TokenAllocatorContract
from pegboard.core.interfaces.keys import PrefixKey
from pegboard.core.interfaces.plugin import Provider
from pegboard.core.interfaces.prefix_cache import PrefixCacheContext
from pegboard.core.interfaces.status import ReqStatus
from pegboard.core.interfaces.token_allocator import TokenAllocatorContext


def test_make_req() -> None:
    req = make_req("a", [5, 6], [7], priority=3, namespace="salt")
    assert (req.rid, req.prompt_ids.tolist(), req.output_ids.tolist()) == ("a", [5, 6], [7])
    assert (req.priority, req.namespace, req.status) == (3, "salt", ReqStatus.RUNNING)
    assert make_req().status is ReqStatus.WAITING
    assert make_req(output=[1], status=ReqStatus.RETRACTED).status is ReqStatus.RETRACTED


def test_registry_of() -> None:
    registry = registry_of(Provider("sampler", "dice", "a:B", ""), distribution="casino")
    assert [str(record) for record in registry.providers("sampler")] == ["dice (casino 0)"]
    assert registry.providers("prefix_cache") == ()


def test_allocator_counts() -> None:
    allocator = CountingAllocator(4, page_size=2)
    slots = allocator.alloc_slots(3)
    assert slots.tolist() == [2, 3, 4]
    assert (allocator.free_pages, allocator.handed_out, allocator.held) == (2, 2, {1, 2})
    with pytest.raises(ValueError, match="have no owner: pages \\[3\\]"):
        allocator.free(np.array([1, 3]))
    allocator.free(np.array([2, 1]))
    assert (allocator.free_tokens, allocator.taken_back) == (8, 2)
    with pytest.raises(MemoryError):
        allocator.alloc_slots(9)


def test_empty_cache() -> None:
    cache = EmptyCache()
    key = PrefixKey(np.arange(3, dtype=np.int64))
    match = cache.match(key)
    assert len(match) == 0
    cache.lock(match.handle)
    cache.unlock(match.handle)
    assert cache.insert(key, np.arange(3, dtype=np.int64)).taken == 0
    assert (cache.evict(5), cache.cached_tokens) == (0, 0)
    cache.reset()


class _Allocator(CountingAllocator):
    """The fake, built as providers are."""

    def __init__(self, options: Any, ctx: TokenAllocatorContext) -> None:
        super().__init__(ctx.num_pages, ctx.page_size)


class _Cache(EmptyCache):
    """The fake, built as providers are."""

    def __init__(self, options: Any, ctx: PrefixCacheContext) -> None:
        super().__init__(ctx.page_size, ctx.allocator)


class TestCountingAllocator(TokenAllocatorContract):
    factory = _Allocator


class TestEmptyCache(PrefixCacheContract):
    factory = _Cache
