"""FanMover: one mover for several ranks, each with a part of every page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.core.interfaces.page_mover import PageMover

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.page_mover import Job


@dataclass(frozen=True, slots=True)
class FanJob:
    """The same move on all ranks: over when it is over everywhere, and as far as it got everywhere."""

    jobs: tuple[Job, ...]

    @property
    def done(self) -> bool:
        return all(job.done for job in self.jobs)

    @property
    def result(self) -> int:
        return min(job.result for job in self.jobs)

    @property
    def error(self) -> str:
        return next((job.error for job in self.jobs if job.error), "")


class RankMover(PageMover, Protocol):
    """A rank's mover: one of a process that has a part of every page."""

    def stats(self) -> Mapping[str, float]: ...

    def close(self) -> tuple[str, ...]: ...


class FanMover:
    """A PageMover over those of several ranks, which are alike. What one rank lacks, all lack."""

    def __init__(self, movers: Sequence[RankMover]) -> None:
        """Join the movers of all ranks. Raises ValueError where they differ in their blocks or storages."""
        shapes = {(mover.block_pages, mover.stores) for mover in movers}
        if len(shapes) != 1:
            raise ValueError(f"ranks need the same blocks and storages, got {sorted(shapes) or 'none'}")
        self._movers = tuple(movers)

    @property
    def host_pages(self) -> int:
        return min(mover.host_pages for mover in self._movers)

    @property
    def block_pages(self) -> int:
        return self._movers[0].block_pages

    @property
    def stores(self) -> tuple[str, ...]:
        return self._movers[0].stores

    def save(self, device: NDArray[np.int64], host: NDArray[np.int64]) -> FanJob:
        return FanJob(tuple(mover.save(device, host) for mover in self._movers))

    def store(self, store: int, keys: Sequence[bytes], host: NDArray[np.int64]) -> FanJob:
        return FanJob(tuple(mover.store(store, keys, host) for mover in self._movers))

    def find(self, keys: Sequence[bytes]) -> FanJob:
        return FanJob(tuple(mover.find(keys) for mover in self._movers))

    def fetch(self, keys: Sequence[bytes], host: NDArray[np.int64]) -> FanJob:
        return FanJob(tuple(mover.fetch(keys, host) for mover in self._movers))

    def cancel(self, job: Job) -> None:
        if isinstance(job, FanJob):
            for mover, part in zip(self._movers, job.jobs, strict=True):
                mover.cancel(part)

    def wait(self, jobs: Sequence[Job], timeout: float) -> bool:
        until = time.monotonic() + timeout
        parts = [job.jobs for job in jobs if isinstance(job, FanJob)]
        for rank, mover in enumerate(self._movers):
            if not mover.wait([part[rank] for part in parts], max(0.0, until - time.monotonic())):
                return False
        return True

    def stats(self) -> dict[str, float]:
        """Return the sums over all ranks."""
        found: Counter[str] = Counter()
        for mover in self._movers:
            found.update(mover.stats())
        return dict(found)

    def close(self) -> tuple[str, ...]:
        """End the jobs and threads of all ranks. Returns the names of storages that a call of some rank hangs in."""
        hanging = {name for mover in self._movers for name in mover.close()}
        return tuple(name for name in self.stores if name in hanging)
