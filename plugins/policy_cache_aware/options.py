"""Options of the cache-aware policies. The defaults are SGLang's."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class CacheAwareOptions(Options):
    """Options of all policies that ask the cache."""

    rematch_limit: int | None = Field(default=32, ge=1)
    """Most requests that are matched anew per step once the cache has changed; for the others their last match stands
    in. null: all of them, however long that takes."""

    fallback_above: int | None = Field(default=None, ge=0)
    """With more waiting requests than this the queue is served as it stands (fcfs); 0 or null never falls back."""


class LpmOptions(CacheAwareOptions):
    """Options of `lpm`."""

    fallback_above: int | None = Field(default=128, ge=0)
    """With more waiting requests than this the queue is served as it stands (fcfs), since matching every prompt costs
    time at each step; 0 or null never falls back."""

    in_batch_check_threshold: int = Field(default=32, ge=-1)
    """A request with at most this many cached tokens is compared with the others that wait; -1 compares none."""

    in_batch_deprioritize_threshold: int = Field(default=32, ge=1)
    """A request that shares at least this many tokens with an earlier one of those waits after all others, so that
    the earlier one can fill the cache first."""


class DfsWeightOptions(CacheAwareOptions):
    """Options of `dfs-weight`."""
