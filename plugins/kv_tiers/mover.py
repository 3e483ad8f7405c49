"""LocalMover: moves pages between this process's device, its host pool and its storages."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pegboard.plugins.kv_tiers.tier_store import Deadlines, TierStore
from pegboard.plugins.kv_tiers.transfer_jobs import NO_PAGES, TransferJob
from pegboard.plugins.kv_tiers.worker_thread import WorkerThread

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.plugins.kv_tiers.api import HostPool, Job, KVStorage

logger = logging.getLogger(__name__)

COPY_BYTES = {"cpu": 2**20}
"""About as much is copied to the host at once, by the device's type: on a CPU the copy shares cores and memory with
the forward pass.
"""
OTHER_COPY_BYTES = 2**24
LOOK_SECONDS = 0.1
"""How often calls under way are looked at."""
CLOSE_SECONDS = 2.0
"""How long closing waits for calls that are under way."""
USUAL = Deadlines()


class LocalMover:
    """A PageMover with one thread for copies to the host, two for each storage, and one that watches over these.

    What a storage or the host pool does wrong ends a job early, with an error, and is counted; nothing else comes of
    it. `storages` are named, nearest first.
    """

    def __init__(
        self,
        pool: KVPool,
        host: HostPool | None,
        storages: Sequence[tuple[str, KVStorage]] = (),
        *,
        deadlines: Deadlines = USUAL,
        clock: Clock = time.monotonic,
    ) -> None:
        if storages and host is None:
            raise ValueError("storages need a host pool: what they have goes through it")
        self._pool = pool
        self._host = host
        self._ended = threading.Condition()
        """Notified whenever a job ends."""
        self._begun, self._closed = threading.Event(), threading.Event()
        self._saved_pages = 0
        self._save_seconds = 0.0
        self._failed_saves = 0
        self._copies = WorkerThread("kv-save", self._save, self._left)
        self._piece, self._page_bytes = (1, 0) if host is None else self._sizes(host)
        make = functools.partial(TierStore, deadlines=deadlines, clock=clock, began=self._begun.set)
        self._stores = [make(name, storage, host, self._left) for name, storage in storages if host is not None]
        if self._stores:
            threading.Thread(target=self._watch, name="kv-watch", daemon=True).start()

    @property
    def host_pages(self) -> int:
        return 0 if self._host is None else self._host.num_pages

    @property
    def block_pages(self) -> int:
        return 1 if self._host is None else self._host.block_pages

    @property
    def stores(self) -> tuple[str, ...]:
        return tuple(store.name for store in self._stores)

    def save(self, device: NDArray[np.int64], host: NDArray[np.int64]) -> TransferJob:
        if device.shape != host.shape:
            raise ValueError(f"{device.shape[0]} device pages cannot be copied to {host.shape[0]} host pages")
        job = TransferJob(self._ended, "save", host, device=device)
        if self._host is None or not self._copies.put(job):
            job.finish("there is no host pool, or no thread to copy to it")
        return job

    def store(self, store: int, keys: Sequence[bytes], host: NDArray[np.int64]) -> TransferJob:
        self._check_blocks(keys, host)
        if not 0 <= store < len(self._stores):
            raise IndexError(f"there are {len(self._stores)} storages, and none of index {store}")
        return self._begin(TransferJob(self._ended, "store", host, keys=keys, store=store))

    def find(self, keys: Sequence[bytes]) -> TransferJob:
        return self._begin(TransferJob(self._ended, "find", NO_PAGES, keys=keys))

    def fetch(self, keys: Sequence[bytes], host: NDArray[np.int64]) -> TransferJob:
        self._check_blocks(keys, host)
        return self._begin(TransferJob(self._ended, "fetch", host, keys=keys))

    def cancel(self, job: Job) -> None:
        if isinstance(job, TransferJob):
            job.stop()

    def wait(self, jobs: Sequence[Job], timeout: float) -> bool:
        with self._ended:
            return self._ended.wait_for(lambda: all(job.done for job in jobs), timeout)

    def supervise(self) -> None:
        """Abandon storage calls that have overrun. The mover's own thread does it as long as calls are under way."""
        for store in self._stores:
            store.supervise()

    def stats(self) -> dict[str, float]:
        """Return what was moved, by direction, and how each storage is, under its name."""
        found: dict[str, float] = {
            "saved_bytes_total": self._saved_pages * self._page_bytes,
            "save_seconds_total": self._save_seconds,
            "save_failures_total": self._failed_saves,
            "save_restarts_total": self._copies.restarts,
        }
        for store in self._stores:
            found |= {f"{store.name}_{name}": value for name, value in store.stats().items()}
        return found

    def close(self, seconds: float = CLOSE_SECONDS) -> tuple[str, ...]:
        """End all jobs and threads, within `seconds`. Returns the names of storages that a call still hangs in: they,
        and the host pool, must not be closed under it.
        """
        self._closed.set()
        self._begun.set()
        left = self._copies.close() + [job for store in self._stores for job in store.close()]
        for job in left:
            job.finish("the mover is closed")
        until = time.monotonic() + seconds
        self._copies.join(until - time.monotonic())
        return tuple([store.name for store in self._stores if not store.join(until)])

    # ---- in the threads -------------------------------------------------------------------------------------------

    def _sizes(self, host: HostPool) -> tuple[int, int]:
        """Return how many pages are copied at once, and the bytes of one."""
        page_bytes = host.page_size * host.bytes_per_token(host.layers, host.dtype)
        device = self._pool.keys(self._pool.layer_ids[0]).device.type
        return max(1, COPY_BYTES.get(device, OTHER_COPY_BYTES) // page_bytes), page_bytes

    def _save(self, job: TransferJob) -> None:
        if not job.begin() or self._host is None:
            return
        device, host = torch.from_numpy(job.device), torch.from_numpy(job.host)
        began, error = time.perf_counter(), ""
        try:
            while job.moved < job.total and not job.stopping:
                piece = slice(job.moved, job.moved + self._piece)
                self._host.save(self._pool, device[piece], host[piece])
                job.moved = min(piece.stop, job.total)
                time.sleep(0)  # let the scheduler's thread have the interpreter now, and not in five milliseconds
        except Exception as failure:
            logger.exception("copying %d pages to the host failed", job.total)
            error = f"{type(failure).__name__}: {failure}"
            self._failed_saves += 1
        self._saved_pages += job.moved
        self._save_seconds += time.perf_counter() - began
        job.finish(error)

    def _begin(self, job: TransferJob) -> TransferJob:
        if job.store < len(self._stores):
            self._stores[job.store].put(job)
        else:
            job.finish("" if job.kind == "find" else "there is no storage")
        return job

    def _left(self, job: TransferJob, trouble: str) -> None:
        """Go on with a job that is through with a storage: what that one lacks is asked of the next."""
        job.trouble = job.trouble or trouble
        following = job.store + 1
        if job.kind in ("save", "store") or job.moved >= job.total or following >= len(self._stores):
            job.finish(job.trouble)
        elif job.pause():
            job.store = following
            self._stores[following].put(job)

    def _check_blocks(self, keys: Sequence[bytes], host: NDArray[np.int64]) -> None:
        if host.shape != (len(keys), self.block_pages):
            raise ValueError(f"{len(keys)} keys need host pages [{len(keys)}, {self.block_pages}], not {host.shape}")

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._begun.wait()
            self._closed.wait(LOOK_SECONDS)
            try:
                self.supervise()
            except Exception:
                logger.exception("watching over storages failed; it goes on")
            self._begun.clear()
            if any(store.calls.under_way for store in self._stores):
                self._begun.set()
