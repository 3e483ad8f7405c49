"""Options of the radix cache."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options
from pegboard.toolkit.cache.eviction import Order


class RadixOptions(Options):
    eviction: Order = "lru"
    """Which leaf of the tree is evicted first: the least recently used (lru), the least often found (lfu), the oldest
    (fifo), the least recently used of those never found again (slru), or that of the lowest request priority
    (priority)."""

    protected_share: float = Field(default=0.8, ge=0.0, le=1.0)
    """With slru: the share of the KV pool that prefixes found at least once may take. Beyond it the least recently used
    of them lose their protection."""
