"""Moves of pages in virtual time: a PageMover whose jobs end when their bytes have passed."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.plugins.kv_tiers.api import Job
    from pegboard.tools.lab.clock import VirtualClock

Kind = Literal["save", "store", "find", "fetch"]
NEVER = math.inf
NO_PAGES = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that a move takes for each unit, by direction, and beside."""

    read: float
    write: float
    latency: float = 0.0


class VirtualStore:
    """The keys of a storage's blocks, the least recently used first; the oldest go where there are more than `room`."""

    def __init__(self, name: str, speed: Speed, room: float = math.inf) -> None:
        self.name = name
        self.speed = speed
        self.room = room
        self.evicted = 0
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def known(self, keys: Sequence[bytes]) -> int:
        """Count how many blocks are there, from the first on."""
        return sum(1 for _ in itertools.takewhile(self._keys.__contains__, keys))

    def use(self, keys: Sequence[bytes]) -> None:
        """Note that blocks were read."""
        for key in keys:
            if key in self._keys:
                self._keys.move_to_end(key)

    def put(self, keys: Sequence[bytes]) -> None:
        """Keep blocks."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.room:
            self._keys.popitem(last=False)
            self.evicted += 1


class VirtualJob:
    """A move that was asked for. `store` is the storage that is asked just now, `moved` what is through, and `count`
    what the lane that has it moves.
    """

    __slots__ = ("_mover", "count", "ended", "error", "host", "keys", "kind", "lane", "moved", "store", "total", "unit")

    def __init__(
        self,
        mover: VirtualMover,
        kind: Kind,
        lane: Lane | None,
        *,
        keys: Sequence[bytes] = (),
        host: NDArray[np.int64] = NO_PAGES,
        store: int = 0,
    ) -> None:
        self._mover = mover
        self.kind: Kind = kind
        self.lane = lane
        self.keys = tuple(keys)
        self.host = host.copy()
        self.store = store
        self.total = len(self.keys) if kind != "save" else int(host.shape[0])
        self.moved = self.count = 0
        self.unit = 0.0
        self.ended = False
        self.error = ""

    @property
    def done(self) -> bool:
        self._mover.advance()
        return self.ended

    @property
    def result(self) -> int:
        return self.moved


@dataclass(slots=True, eq=False)
class Lane:
    """What is moved one after the other, as by a thread. `ends` is when the move under way does; NEVER without one."""

    latency: float
    waiting: deque[VirtualJob] = field(default_factory=deque)
    job: VirtualJob | None = None
    began: float = 0.0
    ends: float = NEVER
    units: int = 0
    seconds: float = 0.0

    def count_until(self, now: float) -> int:
        """Return how many units of the move under way have passed by now."""
        if self.job is None:
            return 0
        passed = now - self.began - self.latency
        whole = self.job.count if not self.job.unit else int(passed / self.job.unit)
        return min(self.job.count, max(0, whole))


class VirtualMover:
    """A PageMover of nothing but times and keys. As the real one it copies to the host in one lane, and has two for
    each storage: one looks and reads, the other writes. What one storage lacks is asked of the next.

    Jobs end in the order of virtual time, whenever some part looks at them. It knows which host pages have ever been
    filled, and what each storage keeps, and no more: what is found is what was stored.
    """

    def __init__(
        self, host_pages: int, block_pages: int, host: Speed, stores: Sequence[VirtualStore], clock: VirtualClock
    ) -> None:
        """Take speeds in seconds per page for the host, and in seconds per block for storages."""
        self.host_pages = host_pages
        self.block_pages = block_pages
        self.storages = tuple(stores)
        self.filled = np.zeros(host_pages + 1, np.bool_)
        """By host page, whether something was written to it."""
        self._host = host
        self._clock = clock
        self._copies = Lane(host.latency)
        self._readers = [Lane(store.speed.latency) for store in stores]
        self._writers = [Lane(store.speed.latency) for store in stores]
        self._lanes = [self._copies, *self._readers, *self._writers]
        self.next_end = NEVER
        """When the next move ends."""

    @property
    def stores(self) -> tuple[str, ...]:
        return tuple(store.name for store in self.storages)

    def save(self, device: NDArray[np.int64], host: NDArray[np.int64]) -> VirtualJob:
        if device.shape != host.shape:
            raise ValueError(f"{device.shape[0]} device pages cannot be copied to {host.shape[0]} host pages")
        return self._ask(VirtualJob(self, "save", self._copies, host=host))

    def store(self, store: int, keys: Sequence[bytes], host: NDArray[np.int64]) -> VirtualJob:
        self._check_blocks(keys, host)
        return self._ask(VirtualJob(self, "store", self._writers[store], keys=keys, host=host, store=store))

    def find(self, keys: Sequence[bytes]) -> VirtualJob:
        return self._ask(VirtualJob(self, "find", self._reader(0), keys=keys))

    def fetch(self, keys: Sequence[bytes], host: NDArray[np.int64]) -> VirtualJob:
        self._check_blocks(keys, host)
        return self._ask(VirtualJob(self, "fetch", self._reader(0), keys=keys, host=host))

    def cancel(self, job: Job) -> None:
        self.advance()
        if not isinstance(job, VirtualJob) or job.ended or job.lane is None:
            return
        lane, now = job.lane, self._clock.now
        if lane.job is job:
            self._take(lane, job, lane.count_until(now), now)
            self._next(lane, now)
        else:
            lane.waiting.remove(job)
        job.ended = True

    def wait(self, jobs: Sequence[Job], timeout: float) -> bool:
        """Let virtual time pass."""
        until = self._clock.now + timeout
        while not all(job.done for job in jobs) and self.next_end <= until:
            self._clock.now = max(self._clock.now, self.next_end)
        done = all(job.done for job in jobs)
        if not done:
            self._clock.now = until
        return done

    def advance(self) -> None:
        """End what has ended by now, in its order."""
        while self.next_end <= self._clock.now:
            lane = min(self._lanes, key=lambda one: one.ends)
            job, at = lane.job, lane.ends
            assert job is not None
            self._take(lane, job, job.count, at)
            self._next(lane, at)
            self._go_on(job, at)

    def moved(self) -> dict[str, float]:
        """Return the units that went each way: pages to the host, and blocks from and to each storage."""
        self.advance()
        found = {"saved_pages": float(self._copies.units)}
        for store, reader, writer in zip(self.storages, self._readers, self._writers, strict=True):
            found |= {f"{store.name}_read": float(reader.units), f"{store.name}_written": float(writer.units)}
        return found

    # ---- lanes ----------------------------------------------------------------------------------------------------

    def _reader(self, store: int) -> Lane | None:
        return self._readers[store] if store < len(self._readers) else None

    def _ask(self, job: VirtualJob) -> VirtualJob:
        self.advance()
        self._put(job, self._clock.now)
        return job

    def _put(self, job: VirtualJob, at: float) -> None:
        if job.lane is None:
            job.ended = True
        elif job.lane.job is None and not job.lane.waiting:
            self._begin(job.lane, job, at)
        else:
            job.lane.waiting.append(job)

    def _begin(self, lane: Lane, job: VirtualJob, at: float) -> None:
        """Have a lane take up a job; what a storage has is known from here on."""
        job.count, job.unit = self._plan(job)
        lane.job, lane.began, lane.ends = job, at, at + lane.latency + job.count * job.unit
        self.next_end = min(one.ends for one in self._lanes)

    def _plan(self, job: VirtualJob) -> tuple[int, float]:
        """Return how much of a job its lane moves, and the seconds of each page or block."""
        if job.kind == "save":
            return job.total, self._host.write
        store = self.storages[job.store]
        known = store.known(job.keys[job.moved :])
        if job.kind == "store":
            job.moved = known  # what it has is not written again
            return job.total - known, store.speed.write
        return known, store.speed.read if job.kind == "fetch" else 0.0

    def _take(self, lane: Lane, job: VirtualJob, count: int, at: float) -> None:
        """Note what a lane has moved of a job, and that it is through with it."""
        start, job.moved = job.moved, job.moved + count
        keys = job.keys[start : job.moved]
        if job.kind in ("save", "fetch"):
            self.filled[job.host[start : job.moved].reshape(-1)] = True
        if job.kind == "store":
            self.storages[job.store].put(job.keys[: job.moved])
        elif keys:
            self.storages[job.store].use(keys)
        if job.kind != "find":
            lane.units += count
        lane.seconds += at - lane.began
        lane.job, lane.ends = None, NEVER

    def _next(self, lane: Lane, at: float) -> None:
        if lane.waiting:
            self._begin(lane, lane.waiting.popleft(), at)
        else:
            self.next_end = min(one.ends for one in self._lanes)

    def _go_on(self, job: VirtualJob, at: float) -> None:
        """End a job, or ask the next storage for the rest."""
        if job.kind in ("save", "store") or job.moved >= job.total:
            job.ended = True
            return
        job.store += 1
        job.lane = self._reader(job.store)
        self._put(job, at)

    def _check_blocks(self, keys: Sequence[bytes], host: NDArray[np.int64]) -> None:
        if host.shape != (len(keys), self.block_pages):
            raise ValueError(f"{len(keys)} keys need host pages [{len(keys)}, {self.block_pages}], not {host.shape}")
