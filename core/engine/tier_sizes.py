"""What a config says of tiers, checked and counted in pages. Without torch, so that the policy lab can read it too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import ConfigError, Problem

if TYPE_CHECKING:
    from pegboard.core.config.sections import MemorySection

HOST_TIMES = 2
"""An unset `memory.host.max_total_tokens` is so many times the device's pool, if the machine has as much."""


def refuse_storage(memory: MemorySection, cache: str) -> None:
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
