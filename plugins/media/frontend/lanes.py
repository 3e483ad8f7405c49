"""Lanes: helper processes for items of three sizes, so that no item waits for one that takes much longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pegboard.plugins.media.frontend.process import PreparedItem, PrepareJob, make_pool

if TYPE_CHECKING:
    from concurrent.futures import Future

    from pegboard.plugins.media.frontend.stats import MediaStats
    from pegboard.plugins.media.frontend.worker import Start

PIXEL_SECONDS = 1e-8
"""Computing time of an expected pixel, about."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Items of at most so many expected pixels (None: of more than the others take), and which part of
    `media.prepare_seconds` one of them may compute for.
    """

    most_pixels: int | None
    share: float


LANES = (Lane(4 * 2**20, 1 / 8), Lane(32 * 2**20, 1 / 2), Lane(None, 1.0))
"""From the smallest one on."""


class Lanes:
    """The helper processes: at most so many in each lane, which start with its first item. In a lane askers take turns,
    and of one asker's items small ones go first. Thread-safe.
    """

    def __init__(self, start: Start, stats: MediaStats, *, helpers: int = 1, jobs: int = 500) -> None:
        self._pools = [
            make_pool(msgspec.structs.replace(start, seconds=start.seconds * lane.share), stats, helpers, jobs)
            for lane in LANES
        ]

    def submit(self, job: PrepareJob) -> Future[PreparedItem]:
        """Prepare an item when its turn comes. Cancelling the future saves the work, as far as it is not done."""
        return self._pools[lane_of(job.pixels)].submit(job, job.asker, PIXEL_SECONDS * job.pixels)

    @property
    def lost(self) -> int:
        """Helpers that were killed or stopped from outside, since the start."""
        return sum(pool.lost for pool in self._pools)

    def pids(self) -> list[int]:
        """Of the helpers that are there."""
        return [pid for pool in self._pools for pid in pool.pids()]

    def close(self) -> None:
        """End the helpers; what is not done fails. May be called twice."""
        for pool in self._pools:
            pool.close()


def lane_of(pixels: int) -> int:
    """Return the lane of an item of so many expected pixels, as an index into LANES."""
    return next(i for i, lane in enumerate(LANES) if lane.most_pixels is None or pixels <= lane.most_pixels)
