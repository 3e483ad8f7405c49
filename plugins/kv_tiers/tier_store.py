"""TierStore: one storage as the mover sees it."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pegboard.plugins.kv_tiers.storage_calls import Ask, StorageCalls
from pegboard.plugins.kv_tiers.worker_thread import WorkerThread

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.clock import Clock
    from pegboard.plugins.kv_tiers.api import HostPool, KVStorage
    from pegboard.plugins.kv_tiers.transfer_jobs import TransferJob

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 * 2**20
"""About as much is read or written in one call: between calls a job can be stopped."""
FIND_KEYS = 256
"""Keys that are looked for in one call."""
LOOK_SECONDS = 1.0
"""A storage is asked for its own numbers so often at most, after a job."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that a call may take which reads, or writes."""

    read: float = 5.0
    write: float = 30.0


@dataclass
class Traffic:
    """Blocks that went one way, and the seconds that the calls took."""

    blocks: int = 0
    seconds: float = 0.0


class TierStore:
    """Does the jobs of one storage, in two threads: one looks and reads, so that nothing that is read waits for what is
    written, and one writes. A job that is through here, or cannot be helped, goes to `leave` with the reason.
    """

    def __init__(
        self,
        name: str,
        storage: KVStorage,
        host: HostPool,
        leave: Callable[[TransferJob, str], None],
        *,
        deadlines: Deadlines,
        clock: Clock,
        began: Callable[[], None],
    ) -> None:
        self.name = name
        self._storage = storage
        self._host = host
        self._leave = leave
        self._deadlines = deadlines
        self._clock = clock
        self._piece = max(1, PIECE_BYTES // host.block_bytes)
        self._buffers = threading.local()
        self._read, self._written = Traffic(), Traffic()
        self._told: Mapping[str, float] = {}
        self._look_at = 0.0
        self.calls = StorageCalls(name, clock, began, self._turn_away)
        self._reading = WorkerThread(f"{name}-read", self._do, self._lost)
        self._writing = WorkerThread(f"{name}-write", self._do, self._lost)

    def put(self, job: TransferJob) -> None:
        """Take a job, or leave it at once while the storage is left alone. Never blocks."""
        admitted, job.probe = self.calls.breaker.admit()
        if not admitted:
            self._leave(job, f"the storage {self.name!r} is left alone for a while")
        elif not self._thread_of(job).put(job):
            self._through(job, f"no thread is free for the storage {self.name!r}: it is closed, or too many hang")

    def supervise(self) -> None:
        """Abandon calls that have overrun; what waits behind them is left."""
        self.calls.supervise()

    def stats(self) -> dict[str, float]:
        size = self._host.block_bytes
        calls = self.calls
        return {
            **self._told,
            "read_bytes_total": self._read.blocks * size,
            "read_seconds_total": self._read.seconds,
            "written_bytes_total": self._written.blocks * size,
            "write_seconds_total": self._written.seconds,
            "failures_total": calls.breaker.failures,
            "breaker_open": float(calls.breaker.open),
            "breaker_openings_total": calls.breaker.openings,
            "abandoned_total": calls.abandoned,
            "hanging": calls.abandoned_threads,
            "restarts_total": self._reading.restarts + self._writing.restarts,
        }

    def close(self) -> list[TransferJob]:
        """Take no more jobs, and return those that have not begun."""
        return self._reading.close() + self._writing.close()

    def join(self, until: float) -> bool:
        """Wait for the threads until then, by `time.monotonic`; whether no call is under way any more."""
        for worker in (self._reading, self._writing):
            worker.join(until - time.monotonic())
        return self.calls.all_back

    # ---- in the threads -------------------------------------------------------------------------------------------

    def _thread_of(self, job: TransferJob) -> WorkerThread:
        return self._writing if job.kind == "store" else self._reading

    def _do(self, job: TransferJob) -> None:
        if not job.begin():
            self._put_back(job)
            return
        try:
            trouble = {"find": self._find, "fetch": self._fetch, "store": self._store}[job.kind](job)
        except Exception as error:  # the host pool's: the storage's own are caught
            logger.exception("blocks of %r could not be brought from or to the host", self.name)
            trouble = f"{type(error).__name__}: {error}"
        self._through(job, trouble)
        if not trouble:
            self._look(job)

    def _find(self, job: TransferJob) -> str:
        while job.moved < len(job.keys) and not job.stopping:
            keys = self._keys(job, FIND_KEYS)
            ask = functools.partial(self._storage.exists, keys)
            found, trouble = self._ask(job, "exists", ask, len(keys), self._deadlines.read)
            job.moved += found
            if trouble or found < len(keys):
                return trouble
        return ""

    def _fetch(self, job: TransferJob) -> str:
        while job.moved < len(job.keys) and not job.stopping:
            keys, pages = self._keys(job, self._piece), self._pages(job)
            views = [self._host.view_block(block) for block in pages]
            into = self._into(views)
            began = time.perf_counter()
            ask = functools.partial(self._storage.get, keys, into)
            found, trouble = self._ask(job, "get", ask, len(keys), self._deadlines.read)
            self._count(self._read, found, began)
            for view, block, place in zip(views[:found], into, pages, strict=False):
                if view is None:
                    self._host.read_block(block, place)
            job.moved += found
            if trouble or found < len(keys):
                return trouble
        return ""

    def _store(self, job: TransferJob) -> str:
        trouble = self._find(job)  # what it has is not written again
        while not trouble and job.moved < len(job.keys) and not job.stopping:
            keys, pages = self._keys(job, self._piece), self._pages(job)
            views = [self._host.view_block(block) for block in pages]
            blocks = self._into(views)
            for view, block, place in zip(views, blocks, pages, strict=True):
                if view is None:
                    self._host.write_block(place, block)
            began = time.perf_counter()
            ask = functools.partial(self._storage.set, keys, blocks)
            there, trouble = self._ask(job, "set", ask, len(keys), self._deadlines.write)
            self._count(self._written, there, began)
            job.moved += there
            if there < len(keys):
                break
        return trouble

    def _ask(self, job: TransferJob, kind: str, ask: Ask, most: int, seconds: float) -> tuple[int, str]:
        answer = self.calls.make(kind, self._thread_of(job), ask, most, seconds, probe=job.probe)
        job.probe = False  # its first call was the probe
        return answer

    def _keys(self, job: TransferJob, most: int) -> list[bytes]:
        """Return the next keys of a job."""
        return list(job.keys[job.moved : job.moved + most])

    def _pages(self, job: TransferJob) -> list[torch.Tensor]:
        """Return the host pages int64 [block_pages] of the job's next blocks."""
        pages: NDArray[np.int64] = job.host[job.moved : job.moved + self._piece]
        return list(torch.from_numpy(pages))

    def _into(self, views: Sequence[memoryview | None]) -> list[memoryview]:
        """Return the views, and room in this thread's own buffer where there are none."""
        return [self._room(place) if view is None else view for place, view in enumerate(views)]

    def _room(self, place: int) -> memoryview:
        """Return room for the `place`-th block of a piece. A thread that was abandoned keeps its buffer: its storage
        may yet write to it.
        """
        size = self._host.block_bytes
        buffer: memoryview | None = getattr(self._buffers, "own", None)
        if buffer is None:
            buffer = self._buffers.own = memoryview(bytearray(self._piece * size))
        return buffer[place * size : (place + 1) * size]

    def _count(self, traffic: Traffic, blocks: int, began: float) -> None:
        if blocks:
            traffic.blocks += blocks
            traffic.seconds += time.perf_counter() - began

    def _look(self, job: TransferJob) -> None:
        """Ask the storage for its figures, in its own thread, since it may hang."""
        if self._clock() < self._look_at:
            return
        self._look_at = self._clock() + LOOK_SECONDS

        def look(deadline: float) -> int:
            self._told = {name: float(value) for name, value in self._storage.stats().items()}
            return 0

        self.calls.make("stats", self._thread_of(job), look, 0, self._deadlines.read)

    # ---- the ends of jobs -----------------------------------------------------------------------------------------

    def _through(self, job: TransferJob, trouble: str) -> None:
        self._put_back(job)
        self._leave(job, trouble)

    def _put_back(self, job: TransferJob) -> None:
        """Let another job be the probe, if this one was to be it and has asked nothing."""
        if job.probe:
            job.probe = False
            self.calls.breaker.give_back()

    def _lost(self, job: TransferJob, trouble: str) -> None:
        job.probe = False  # that its thread died counts as its answer
        self._leave(job, trouble)

    def _turn_away(self) -> None:
        """End all jobs that wait: nothing is asked of the storage from now on."""
        for job in self._reading.drain() + self._writing.drain():
            self._through(job, f"the storage {self.name!r} is left alone for a while")
