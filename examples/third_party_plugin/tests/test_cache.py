"""What goes first when memory runs out."""

from typing import Literal

import numpy as np
from pegboard.conformance.fakes import CountingAllocator
from pegboard.core.interfaces import PrefixCacheContext, PrefixKey

from pegboard_example_plugin.cache import WholePromptCache
from pegboard_example_plugin.options import WholePromptOptions


def left(evict: Literal["least_used", "oldest"]) -> list[int]:
    """Of three prompts that were cached in this order, and the first found again: those that outlast two evictions."""
    allocator = CountingAllocator()
    cache = WholePromptCache(WholePromptOptions(evict=evict), PrefixCacheContext(allocator, page_size=1))
    keys = [PrefixKey(np.array([token], dtype=np.int64)) for token in (5, 6, 7)]
    for key in keys:
        pages = allocator.alloc(1)
        assert pages is not None
        cache.insert(key, pages)
    cache.match(keys[0])
    cache.evict(2)
    return [int(key.tokens[0]) for key in keys if len(cache.match(key).slots)]


def test_what_was_found_stays() -> None:
    assert left("least_used") == [5]


def test_what_came_last_stays() -> None:
    assert left("oldest") == [7]
