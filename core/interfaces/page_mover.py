"""Port: moving pages of KV between the device, the host and storages. The core provides it, prefix caches use it.

A cache decides which page goes where; it speaks of page numbers and never sees what is in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Job(Protocol):
    """A move that was asked for. The mover's threads write `result` and `error` before `done`.

    `result` is how many pages, blocks or keys were moved or found, counted from the first one on: those that come after
    it were not, or are not known to be. `error` says why a job stopped early, "" where nothing went wrong; a miss is
    no error. Until a job is done its host pages are being read or written, whatever `cancel` was told.
    """

    @property
    def done(self) -> bool: ...

    @property
    def result(self) -> int: ...

    @property
    def error(self) -> str: ...


class PageMover(Protocol):
    """Moves whole pages in threads of its own. No call blocks but `wait`, and none raises for what a tier does wrong.

    Device pages are those of the token allocator. Host pages are 1 to `host_pages`; they belong to the cache, all of
    them. A block is what storages keep: `block_pages` consecutive pages of a sequence, the first block beginning at the
    sequence's start. `stores` are the storages' names, nearest first. Where there is no host tier, `host_pages` is 0,
    and where there is no storage, `stores` is empty. Arrays of pages are int64, and the mover copies them.
    """

    @property
    def host_pages(self) -> int: ...

    @property
    def block_pages(self) -> int: ...

    @property
    def stores(self) -> tuple[str, ...]: ...

    def save(self, device: NDArray[np.int64], host: NDArray[np.int64]) -> Job:
        """Copy device pages [n] to host pages [n]. Jobs run in the order in which they were asked for.

        Nothing keeps a device page from being freed and written to meanwhile: what was copied of such a page is
        undefined, and only the caller knows.
        """

    def store(self, store: int, keys: Sequence[bytes], host: NDArray[np.int64]) -> Job:
        """Write blocks, host pages [blocks, block_pages], to the storage of this index. What it has is not written
        again.
        """

    def find(self, keys: Sequence[bytes]) -> Job:
        """Count how many of these blocks some storage has, from the first on."""

    def fetch(self, keys: Sequence[bytes], host: NDArray[np.int64]) -> Job:
        """Read blocks into host pages [blocks, block_pages]. What counts has been verified; what is in the other pages
        is undefined.
        """

    def cancel(self, job: Job) -> None:
        """Ask a job to stop. It is over once it is `done`, with what had been moved by then."""

    def wait(self, jobs: Sequence[Job], timeout: float) -> bool:
        """Wait until all jobs are done, for `timeout` seconds at most; whether they are."""
