"""Moves of pages that nothing waits for any more, and whose host pages are out of use until they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.plugins.cache_hiradix.tree import TierTree
    from pegboard.plugins.kv_tiers.api import Job, PageMover


class Leftovers:
    """Cancelled jobs. Their pages are unpinned when they are done, and not before: they are being read or written."""

    def __init__(self, tree: TierTree, mover: PageMover) -> None:
        self._tree = tree
        self._mover = mover
        self._jobs: list[tuple[Job, NDArray[np.int64]]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def leave(self, job: Job, pages: NDArray[np.int64]) -> None:
        self._mover.cancel(job)
        self._jobs.append((job, pages))

    def wait(self, timeout: float) -> None:
        if self._jobs:
            self._mover.wait([job for job, _ in self._jobs], timeout)
            self.poll()

    def poll(self) -> None:
        going = [(job, pages) for job, pages in self._jobs if not job.done]
        if len(going) < len(self._jobs):
            for job, pages in self._jobs:
                if job.done:
                    self._tree.unpin(pages)
            self._jobs = going
