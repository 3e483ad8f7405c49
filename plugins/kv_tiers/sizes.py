"""What a config says of tiers, checked and counted in pages. Without torch, so that the policy lab can read it too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.core.interfaces.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

HOST_TIMES = 2
"""An unset `memory.host.max_total_tokens` is so many times the device's pool, if the machine has as much."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a MemoryContext is known before there is any memory."""

    config: Any
    said: frozenset[str]
    cache: str
    provides: frozenset[str]
    requiring: Callable[[str, str, str], tuple[Sequence[str], Sequence[str]]]


def has_tiers(ctx: Facts) -> bool:
    """Return whether a prefix cache keeps KV beyond the device. Raises ConfigError for storages that it has no use for,
    and logs what else of the config for tiers has no effect.
    """
    if "host_tier" in ctx.provides:
        if ctx.config.memory.storage and "prefetch" in ctx.provides:
            _tell_unread(ctx)
        return True
    _refuse_storage(ctx)
    _tell_no_host(ctx)
    return False


def _tell_unread(ctx: Facts) -> None:
    """Warn of storages that no gate asks for what they have."""
    chosen, installed = ctx.requiring("admission_gate", "prefix_cache", "prefetch")
    if chosen:
        return
    hint = f"gates: [{installed[0]}]" if installed else "no plugin that is installed has one"
    logger.warning("memory.storage is written, but never read: add a gate that asks the storages (%s)", hint)


def _tell_no_host(ctx: Facts) -> None:
    """Warn of what the operator says of a host's memory that the prefix cache does not use."""
    unused = sorted(path for path in ctx.said if path.startswith("memory.host."))
    if unused:
        logger.warning(
            "%s: no effect, for the prefix cache %r keeps nothing on the host; choose a prefix_cache.use with the "
            "capability host_tier (`pegboard plugins list` shows them)",
            ", ".join(unused),
            ctx.cache,
        )


def _refuse_storage(ctx: Facts) -> None:
    """Raise ConfigError for storages behind a prefix cache that has no use for them."""
    if ctx.config.memory.storage:
        raise ConfigError(
            Problem(
                "memory.storage",
                f"the prefix cache {ctx.cache!r} keeps nothing beyond the device; choose a prefix_cache.use with "
                "the capability host_tier (`pegboard plugins list` shows them), or remove memory.storage",
            )
        )


def block_pages(ctx: Facts) -> int:
    """Return the pages of one block. Raises ConfigError where there are storages and blocks are no whole pages."""
    memory = ctx.config.memory
    if memory.storage and memory.storage_block % memory.page_size:
        raise ConfigError(
            Problem(
                "memory.storage_block",
                f"a block of {memory.storage_block} tokens is not whole pages of {memory.page_size} "
                f"(memory.page_size); make it {-(-memory.storage_block // memory.page_size) * memory.page_size}",
            )
        )
    return int(max(1, memory.storage_block // memory.page_size))
