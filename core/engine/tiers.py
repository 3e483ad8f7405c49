"""Tiers: the host pool, the storages and the mover below a prefix cache that makes use of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from pegboard.core.engine.kv_identity import kept_as, kv_identity
from pegboard.core.engine.tier_sizes import HOST_TIMES, block_pages, has_tiers
from pegboard.core.interfaces.contracts import HOST_POOL, KV_STORAGE
from pegboard.core.interfaces.errors import OutOfMemory
from pegboard.core.interfaces.host_pool import HostPool, HostPoolContext
from pegboard.core.interfaces.kv_storage import KVStorage, KVStorageContext
from pegboard.core.pipeline.tiers.loading import HostLoads
from pegboard.core.pipeline.tiers.mover import LocalMover

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.core.config.select import Choice
    from pegboard.core.engine.choose import Chosen, Loaded
    from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
    from pegboard.core.pipeline.worker import Watches

logger = logging.getLogger(__name__)

HOST_SHARE = 0.25
"""An unset `memory.host.max_total_tokens` takes at most this share of the memory that is available."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """What moves pages below the device. `identity` is a digest of what the KV depends on, empty where none leaves this
    process.
    """

    host: HostPool
    mover: LocalMover
    loads: HostLoads
    storages: tuple[KVStorage, ...]
    identity: bytes

    def prepare(self, seconds: float) -> tuple[int, int]:
        """Provide for the host's memory, for about `seconds` at most. Returns the tokens it is there for, and all."""
        return self.host.prepare(seconds) * self.host.page_size, self.host.num_pages * self.host.page_size

    def stats(self) -> Mapping[str, float]:
        """Return what was moved, by direction, and how the storages are."""
        return {**self.loads.stats(), **self.mover.stats()}

    def close(self) -> None:
        """End the threads, then let go of storages and memory, but for those that a call still hangs in."""
        hanging = self.mover.close()
        self.loads.close()
        for name, storage in zip(self.mover.stores, self.storages, strict=True):
            if name not in hanging:
                storage.close()
        if not hanging:
            self.host.close()


def build_tiers(chosen: Chosen, loaded: Loaded, cache: Choice[PrefixCache, PrefixCacheContext]) -> Tiers | None:
    """Return what is below a cache's device pages; None for a cache without tiers.

    Raises ConfigError for storages that the cache has no use for, or whose blocks are no whole pages, and OutOfMemory
    for a host pool that does not fit.
    """
    memory = chosen.resolved.engine.memory
    if not has_tiers(chosen.resolved, cache):
        return None
    host = _host_pool(chosen, loaded, block_pages(memory))
    identity = _identity(chosen, loaded) if memory.storage else b""
    storage_ctx = KVStorageContext(identity.hex(), host.block_bytes)
    choices = chosen.selection.choose_all(KV_STORAGE, storage_ctx)
    storages = tuple(chosen.culprits.know(one.record, one.build(storage_ctx)) for one in choices)
    named = [(one.name, storage) for one, storage in zip(choices, storages, strict=True)]
    mover = LocalMover(loaded.memory.pool, host, named)
    loads = HostLoads(host, loaded.memory.pool, chosen.model.device)
    return Tiers(host, mover, loads, storages, identity)


def watches(chosen: Chosen) -> Watches:
    """Return what waits for the layers of a prefix that is being loaded."""
    provides = chosen.runner.provides
    if "layer_watch" in provides:
        return "batch"
    return "nothing" if "own_attention" in provides else "attention"


def _host_pool(chosen: Chosen, loaded: Loaded, block: int) -> HostPool:
    memory, device, dtype = chosen.resolved.engine.memory, chosen.model.device, chosen.kv_dtype
    layers = chosen.spec.layers + chosen.further
    choice = chosen.selection.choose(HOST_POOL, HostPoolContext(1, memory.page_size, layers, dtype, device, block))
    per_page = memory.page_size * choice.cls.bytes_per_token(layers, dtype)
    available = int(psutil.virtual_memory().available)
    wanted = memory.host.max_total_tokens
    if wanted is None:
        pages = min(HOST_TIMES * loaded.memory.num_pages, int(available * HOST_SHARE) // per_page)
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
    ctx = HostPoolContext(pages, memory.page_size, layers, dtype, device, block)
    return chosen.culprits.know(choice.record, choice.build(ctx))


def _identity(chosen: Chosen, loaded: Loaded) -> bytes:
    layers = chosen.spec.layers + chosen.further
    return kv_identity(chosen.model, layers, numerics=loaded.numerics, kept=kept_as(loaded.memory.pool, chosen.model))
