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
    """What goes first, on the device and on the host: the least recently used (lru), the least often found (lfu), the
    oldest (fifo), the least recently used of those never found again (slru), the one of the lowest request priority
    (priority). Of the host's pages, those that the device has as well go before all others, but not with write_back,
    which has copied them as they are about to leave the device."""

    protected_share: float = Field(default=0.8, ge=0.0, le=1.0)
    """With slru: the share of both tiers that prefixes found at least once may take before the least recently used of
    them lose their protection."""

    hits_to_save: int = Field(default=2, ge=1)
    """With write_through_selective: from which use of a prefix on it is copied to the host. The request that computed
    it is its first use."""

    load_threshold: int = Field(default=10, ge=1)
    """How many tokens on the host are worth a load; fewer are computed."""

    save_batch: int = Field(default=1024, ge=1)
    """How many tokens one copy to the host has at most (but at least a page)."""

    sync_tokens: int = Field(default=256, ge=0)
    """With write_back: how many tokens that eviction finds uncopied are copied at once in a step; those beyond are
    lost."""

    clean_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """With write_back: the share of the device's pool that eviction should be able to take at any time before it meets
    what has no copy (at most half of the host's pages)."""

    store_share: float = Field(default=0.25, ge=0.0, le=1.0)
    """The share of the host's pages that may wait to be written to storages; what comes beyond it is not written."""

    hits_to_store: int = Field(default=1, ge=1)
    """From which use of a prefix on it is written to storages. The request that computed it is its first use."""

    prefetch_threshold: int = Field(default=256, ge=1)
    """How many tokens in storages are worth a prefetch; fewer are computed."""

    prefetch_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """The share of the host's pages that may be waiting for blocks from storages."""
