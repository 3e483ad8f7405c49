"""Tiers: the host pool, the storages and the mover below a prefix cache that makes use of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import psutil

from pegboard.core.interfaces.errors import ConfigError, OutOfMemory, Problem
from pegboard.plugins.kv_tiers import HOST_POOL, KV_STORAGE
from pegboard.plugins.kv_tiers.api import HostPool, HostPoolContext, KVStorage, KVStorageContext, Tiers
from pegboard.plugins.kv_tiers.loading import HostLoads
from pegboard.plugins.kv_tiers.mover import LocalMover
from pegboard.plugins.kv_tiers.sizes import HOST_TIMES, Facts, block_pages, has_tiers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.core.interfaces.choosing import MemoryContext

logger = logging.getLogger(__name__)

HOST_SHARE = 0.25
"""An unset `memory.host.max_total_tokens` takes at most this share of the memory that is available."""


class LocalTiers(Tiers):
    """What moves pages below the device, in this process. `loads` fills device pages for batches."""

    def __init__(
        self, host: HostPool, mover: LocalMover, loads: HostLoads, storages: tuple[KVStorage, ...], identity: bytes
    ) -> None:
        super().__init__(mover, identity)
        self.loads = loads
        self.host = host
        self._mover = mover
        self.storages = storages

    def prepare(self, seconds: float) -> tuple[int, int]:
        return self.host.prepare(seconds) * self.host.page_size, self.host.num_pages * self.host.page_size

    def stats(self) -> Mapping[str, float]:
        return {**self.loads.stats(), **self._mover.stats()}

    def close(self) -> None:
        """End the threads, then let go of storages and memory, but for those that a call still hangs in."""
        hanging = self._mover.close()
        self.loads.close()
        for name, storage in zip(self._mover.stores, self.storages, strict=True):
            if name not in hanging:
                storage.close()
        if not hanging:
            self.host.close()


def build_tiers(ctx: MemoryContext) -> LocalTiers | None:
    """Return what is below a cache's device pages; None for a cache without tiers.

    Raises ConfigError for storages that the cache has no use for, or whose blocks are no whole pages, and for a model
    without KV; OutOfMemory for a host pool that does not fit.
    """
    facts = Facts(ctx.config, ctx.said, ctx.cache, ctx.provides, ctx.requiring)
    if not has_tiers(facts):
        return None
    if not ctx.layers:
        text = "the model keeps states alone, and tiers keep KV; use a cache without tiers, such as radix"
        raise ConfigError(Problem("prefix_cache.use", text))
    host = _host_pool(ctx, block_pages(facts))
    identity = ctx.identity() if ctx.config.memory.storage else b""
    storage_ctx = KVStorageContext(identity.hex(), host.block_bytes)
    named = [(choice.name, choice.build(storage_ctx)) for choice in ctx.choose(KV_STORAGE, storage_ctx)]
    mover = LocalMover(ctx.pool, host, named)
    loads = HostLoads(host, ctx.pool, ctx.device)
    return LocalTiers(host, mover, loads, tuple(storage for _, storage in named), identity)


def _host_pool(ctx: MemoryContext, block: int) -> HostPool:
    memory, layers = ctx.config.memory, ctx.layers
    about = HostPoolContext(1, memory.page_size, layers, ctx.dtype, ctx.device, block)
    (choice,) = ctx.choose(HOST_POOL, about)
    per_page = memory.page_size * choice.cls.bytes_per_token(layers, ctx.dtype)
    available = int(psutil.virtual_memory().available)
    wanted = memory.host.max_total_tokens
    if wanted is None:
        pages = min(HOST_TIMES * ctx.num_pages, int(available * HOST_SHARE) // per_page)
    else:
        pages = wanted // memory.page_size
    pages = max(block, pages)
    if pages * per_page > available:
        raise OutOfMemory(
            f"a host pool of {pages * memory.page_size} tokens takes {pages * per_page / 2**30:.1f} GiB, but only "
            f"{available / 2**30:.1f} GiB are available; lower memory.host.max_total_tokens to at most "
            f"{available // per_page * memory.page_size}"
        )
    logger.info("KV on the host: %d tokens, %.2f GiB", pages * memory.page_size, pages * per_page / 2**30)
    return choice.build(HostPoolContext(pages, memory.page_size, layers, ctx.dtype, ctx.device, block))
