"""Options of the cache with tiers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pegboard.core.interfaces.options import Options
from pegboard.toolkit.cache.eviction import Order

Policy = Literal["write_through", "write_through_selective", "write_back"]


class HiRadixOptions(Options):
    write_policy: Policy = "write_through"
    """When pages are copied to the host: as soon as they are cached (write_through), once their prefix has been used
    `hits_to_save` times (write_through_selective), or when eviction comes close to them (write_back)."""

    eviction: Order = "lru"
    """Which pages are evicted first, on the device and on the host: the least recently used (lru), the least often
    found (lfu), the oldest (fifo), the least recently used of those never found again (slru), or those of the lowest
    request priority (priority). The host first evicts pages that the device has as well, except with write_back, which
    copies pages when they are about to leave the device."""

    protected_share: float = Field(default=0.8, ge=0.0, le=1.0)
    """With slru: the share of both tiers that prefixes found at least once may take. Beyond it the least recently used
    of them lose their protection."""

    hits_to_save: int = Field(default=2, ge=1)
    """With write_through_selective: the number of uses after which a prefix is copied to the host. The request that
    computed it is its first use."""

    load_threshold: int = Field(default=10, ge=1)
    """Smallest number of tokens that are loaded from the host; fewer are computed."""

    save_batch: int = Field(default=1024, ge=1)
    """Maximum number of tokens in one copy to the host (but at least a page)."""

    sync_tokens: int = Field(default=256, ge=0)
    """With write_back: maximum number of uncopied tokens that eviction copies in a step; the rest is lost."""

    clean_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """With write_back: the share of the device's pool that should always be evictable and have copies (at most half of
    the host's pages)."""

    store_share: float = Field(default=0.25, ge=0.0, le=1.0)
    """Share of the host's pages that may wait to be written to storages. Pages beyond it are not written."""

    hits_to_store: int = Field(default=1, ge=1)
    """The number of uses after which a prefix is written to storages. The request that computed it is its first use."""

    prefetch_threshold: int = Field(default=256, ge=1)
    """Smallest number of tokens that are fetched from storages; fewer are computed."""

    prefetch_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the host's pages that may wait for blocks from storages."""
