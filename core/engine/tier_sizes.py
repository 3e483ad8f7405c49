"""What a config says of tiers, checked and counted in pages. Without torch, so that the policy lab can read it too."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pegboard.core.config.sources import is_preset
from pegboard.core.interfaces.contracts import ADMISSION_GATE
from pegboard.core.interfaces.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.config.sections import MemorySection
    from pegboard.core.config.select import Choice
    from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
    from pegboard.core.registry.records import ProviderRecord

logger = logging.getLogger(__name__)

HOST_TIMES = 2
"""An unset `memory.host.max_total_tokens` is so many times the device's pool, if the machine has as much."""


def has_tiers(resolved: ResolvedConfig, cache: Choice[PrefixCache, PrefixCacheContext]) -> bool:
    """Return whether a prefix cache keeps KV beyond the device. Raises ConfigError for storages that it has no use for,
    and logs what else of the config for tiers has no effect.
    """
    if "host_tier" in cache.provides:
        if resolved.engine.memory.storage and "prefetch" in cache.provides:
            _tell_unread(resolved)
        return True
    _refuse_storage(resolved.engine.memory, cache.name)
    _tell_no_host(resolved, cache.name)
    return False


def _tell_unread(resolved: ResolvedConfig) -> None:
    """Warn of storages that no gate asks for what they have."""
    if any(map(_prefetches, resolved.candidates[ADMISSION_GATE.name])):
        return
    gates = [one.name for one in resolved.registry.providers(ADMISSION_GATE.name) if _prefetches(one)]
    hint = f"gates: [{gates[0]}]" if gates else "no plugin that is installed has one"
    logger.warning("memory.storage is written, but never read: add a gate that asks the storages (%s)", hint)


def _prefetches(gate: ProviderRecord) -> bool:
    return any((one.contract, one.capability) == ("prefix_cache", "prefetch") for one in gate.provider.requires)


def _tell_no_host(resolved: ResolvedConfig, cache: str) -> None:
    """Warn of what the operator says of a host's memory that a prefix cache of this name does not use."""
    said = (path for path, origin in resolved.origins.items() if not is_preset(origin))
    unused = sorted(path for path in said if path.startswith("memory.host."))
    if unused:
        logger.warning(
            "%s: no effect, for the prefix cache %r keeps nothing on the host; choose a prefix_cache.use with the "
            "capability host_tier (`pegboard plugins list` shows them)",
            ", ".join(unused),
            cache,
        )


def _refuse_storage(memory: MemorySection, cache: str) -> None:
    """Raise ConfigError for storages behind a prefix cache of this name, which has no use for them."""
    if memory.storage:
        raise ConfigError(
            Problem(
                "memory.storage",
                f"the prefix cache {cache!r} keeps nothing beyond the device; choose a prefix_cache.use with "
                "the capability host_tier (`pegboard plugins list` shows them), or remove memory.storage",
            )
        )


def block_pages(memory: MemorySection) -> int:
    """Return the pages of one block. Raises ConfigError where there are storages and blocks are no whole pages."""
    page_size = memory.page_size
    if memory.storage and memory.storage_block % page_size:
        raise ConfigError(
            Problem(
                "memory.storage_block",
                f"a block of {memory.storage_block} tokens is not whole pages of {page_size} (memory.page_size); make "
                f"it {-(-memory.storage_block // page_size) * page_size}",
            )
        )
    return max(1, memory.storage_block // page_size)
