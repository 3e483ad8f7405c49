"""Options of the cache-aware policies. The defaults are SGLang's."""

from __future__ import annotations

from pydantic import Field

from pegboard.core.interfaces.options import Options


class CacheAwareOptions(Options):
    """Options of all policies that ask the cache."""

    rematch_limit: int | None = Field(default=32, ge=1)
    """Maximum number of requests that are matched again per step after the cache has changed; the others keep their
    last match. null: all of them, however long that takes."""

    fallback_above: int | None = Field(default=None, ge=0)
    """With more waiting requests than this, the queue is served in its order (fcfs). 0 or null: never."""


class LpmOptions(CacheAwareOptions):
    """Options of `lpm`."""

    fallback_above: int | None = Field(default=128, ge=0)
    """With more waiting requests than this, the queue is served in its order (fcfs), because matching every prompt
    costs time at each step. 0 or null: never."""

    in_batch_check_threshold: int = Field(default=32, ge=-1)
    """Requests with at most this many cached tokens are compared with other waiting requests. -1: none."""

    in_batch_deprioritize_threshold: int = Field(default=32, ge=1)
    """If such a request shares at least this many tokens with an earlier one, it waits until after all others, so that
    the earlier one can fill the cache first."""


class DfsWeightOptions(CacheAwareOptions):
    """Options of `dfs-weight`."""
