"""A mover of pages whose jobs end when a test says so, in any order and with any result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegboard.plugins.kv_tiers.api import NAME, PageLoad, Tiers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.kv_tiers.api import Job

UNDEFINED = object()
"""What is in a page that nothing has been written to, or that a copy did not fill."""


class HandJob:
    """A move that was asked for. `kind` is the mover's method; a job has the arguments of it that it needs."""

    def __init__(
        self,
        kind: str,
        *,
        keys: Sequence[bytes] = (),
        device: NDArray[np.int64] | None = None,
        host: NDArray[np.int64] | None = None,
        store: int = 0,
    ) -> None:
        none = np.empty(0, dtype=np.int64)
        self.kind = kind
        self.keys = list(keys)
        self.device = none if device is None else device.copy()
        self.host = none if host is None else host.copy()
        self.store = store
        self.done = False
        self.result = 0
        self.error = ""
        self.cancelled = False

    @property
    def size(self) -> int:
        """How many pages, blocks or keys it is about."""
        return int(self.device.size) if self.kind == "save" else len(self.keys)

    @property
    def writes(self) -> bool:
        return self.kind in ("save", "fetch")

    def __repr__(self) -> str:
        return f"{self.kind}({self.size}, host {self.host.reshape(-1).tolist()})"


class HandMover:
    """A PageMover over plain values: what each device and host page holds, and what each storage has.

    A test writes into `device` what it computes there. Jobs wait in `jobs` until `finish`; what a copy reads is what is
    there then, as of a thread that comes to it late. It complains about a host page that is written to while another
    job reads or writes it, and about pages that do not exist. `on_begin` is told of each job, `on_wait` of what is
    waited for, which it may finish.
    """

    def __init__(self, host_pages: int, block_pages: int = 1, stores: Sequence[str] = ()) -> None:
        self.host_pages = host_pages
        self.block_pages = block_pages
        self.stores = tuple(stores)
        self.device: dict[int, object] = {}
        self.host: dict[int, object] = {}
        self.blocks: list[dict[bytes, tuple[object, ...]]] = [{} for _ in stores]
        self.jobs: list[HandJob] = []
        self.on_begin: Callable[[HandJob], None] = lambda job: None
        self.on_wait: Callable[[Sequence[Job]], None] = lambda jobs: None

    @property
    def services(self) -> Mapping[str, object]:
        """What a cache is given of it."""
        return {NAME: Tiers(self, b"books")}

    def settle(self) -> bool:
        jobs = list(self.jobs)
        for job in jobs:
            self.finish(job)
        return bool(jobs)

    def carry_out(self, load: object) -> NDArray[np.int64]:
        assert isinstance(load, PageLoad), f"{load!r} is not what the device part of tiers takes"
        self.load(load.host, load.device)
        return load.device

    def save(self, device: NDArray[np.int64], host: NDArray[np.int64]) -> HandJob:
        assert device.shape == host.shape, f"{device.shape} device pages are saved to {host.shape} host pages"
        return self._begin(HandJob("save", device=device, host=host))

    def store(self, store: int, keys: Sequence[bytes], host: NDArray[np.int64]) -> HandJob:
        assert 0 <= store < len(self.stores), f"there is no storage {store}"
        self._check_blocks(keys, host)
        return self._begin(HandJob("store", keys=keys, host=host, store=store))

    def find(self, keys: Sequence[bytes]) -> HandJob:
        return self._begin(HandJob("find", keys=keys))

    def fetch(self, keys: Sequence[bytes], host: NDArray[np.int64]) -> HandJob:
        self._check_blocks(keys, host)
        return self._begin(HandJob("fetch", keys=keys, host=host))

    def cancel(self, job: Job) -> None:
        assert isinstance(job, HandJob), f"{job!r} is not a job of this mover"
        job.cancelled = True

    def wait(self, jobs: Sequence[Job], timeout: float) -> bool:
        self.on_wait(jobs)
        return all(job.done for job in jobs)

    def finish(self, job: HandJob, result: int | None = None, error: str = "") -> None:
        """End a job, with all that it can do or with the first `result` of it."""
        self.jobs.remove(job)
        job.result = self._move(job, job.size if result is None else min(result, job.size))
        job.error = error
        job.done = True

    def finish_all(self, kind: str = "") -> None:
        """End all jobs of a kind in the order in which they were asked for."""
        for job in [job for job in self.jobs if kind in ("", job.kind)]:
            self.finish(job)

    def load(self, host: NDArray[np.int64], device: NDArray[np.int64]) -> None:
        """Copy host pages to device pages, as a batch does for its loads."""
        for from_, to in zip(host.tolist(), device.tolist(), strict=True):
            self.device[to] = self.host.get(from_, UNDEFINED)

    def _move(self, job: HandJob, most: int) -> int:
        if job.kind == "find":
            return min(most, self._count(job.keys))
        if job.kind == "store":
            for key, pages in zip(job.keys[:most], job.host.tolist(), strict=False):
                self.blocks[job.store].setdefault(key, tuple(self.host.get(page, UNDEFINED) for page in pages))
            return most
        for page in job.host.reshape(-1).tolist():
            self.host[page] = UNDEFINED
        if job.kind == "save":
            for device, host in zip(job.device[:most].tolist(), job.host[:most].tolist(), strict=True):
                self.host[host] = self.device.get(device, UNDEFINED)
            return most
        most = min(most, self._count(job.keys))
        for key, pages in zip(job.keys[:most], job.host.tolist(), strict=False):
            block = next(store[key] for store in self.blocks if key in store)
            self.host.update(zip(pages, block, strict=True))
        return most

    def _count(self, keys: Sequence[bytes]) -> int:
        return len(list(itertools.takewhile(lambda key: any(key in store for store in self.blocks), keys)))

    def _begin(self, job: HandJob) -> HandJob:
        pages = set(job.host.reshape(-1).tolist())
        assert len(pages) == job.host.size, f"{job!r} names a host page twice"
        assert all(1 <= page <= self.host_pages for page in pages), f"{job!r} names host pages that do not exist"
        for other in self.jobs:
            both = pages & set(other.host.reshape(-1).tolist())
            assert not both or not (job.writes or other.writes), f"{job!r} uses host pages of {other!r}"
        self.jobs.append(job)
        self.on_begin(job)
        return job

    def _check_blocks(self, keys: Sequence[bytes], host: NDArray[np.int64]) -> None:
        wanted = (len(keys), self.block_pages)
        assert host.shape == wanted, f"{len(keys)} blocks of {self.block_pages} pages, but host pages {host.shape}"
