"""What the cache with tiers counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """In tokens. What was found counts when it has been gone on from, or loaded, not each time that it is looked up. Of
    what was loaded a storage had brought `hit_storage`, and `hit_host` is the rest.
    """

    hit_device: int = 0
    hit_host: int = 0
    hit_storage: int = 0
    missed: int = 0
    saved: int = 0
    skipped: int = 0
    """Not copied to the host, for lack of room there."""

    torn: int = 0
    """Evicted while they were being copied, so the copies were given up."""

    failed: int = 0
    """Not copied because the mover could not."""

    cleaned: int = 0
    rescued: int = 0
    """Copied at once as eviction found them uncopied."""

    dropped: int = 0
    """Evicted without a copy although the policy would have had one."""

    loads_failed: int = 0
    stored: int = 0
    store_skipped: int = 0
    store_failed: int = 0
    fetched: int = 0
    fetch_skipped: int = 0
    """In a storage, but not fetched for lack of room on the host."""

    def as_totals(self) -> dict[str, float]:
        return {f"{name}_tokens_total": float(value) for name, value in asdict(self).items()}
