"""A scheduler whose cache has a host tier: pages move between the fake model's slots and an array."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.messages import TokenOutput
from pegboard.core.interfaces.step import StepLost
from pegboard.plugins.kv_tiers.api import NAME, PageLoad
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from tests.core.pipeline.harness import EMPTY, FakeModel, Harness


@dataclass
class Move:
    """A job. What a save copies is read when it ends, or when it begins: pages may change hands in between."""

    kind: str
    device: NDArray[np.int64]
    host: NDArray[np.int64]
    copied: NDArray[np.int64] | None = None
    keys: Sequence[bytes] = ()
    done: bool = False
    result: int = 0
    error: str = ""


@dataclass
class SlotMover:
    """A PageMover for the fake model. Its jobs end when `advance` is called, some of them, each kind in its order."""

    host_pages: int
    page_size: int
    block_pages: int = 1
    stores: tuple[str, ...] = ()
    seed: int = 0
    stored: dict[bytes, NDArray[np.int64]] = field(default_factory=dict)
    jobs: list[Move] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pages = np.full((self.host_pages + 1, self.page_size), EMPTY, np.int64)
        self.random = random.Random(self.seed)
        self.slots = np.empty(0, np.int64)
        self.saved = 0

    def save(self, device: NDArray[np.int64], host: NDArray[np.int64]) -> Move:
        move = Move("save", device.copy(), host.copy())
        if self.random.random() < 0.5:
            move.copied = self._device()[device]
        return self._begin(move)

    def store(self, store: int, keys: Sequence[bytes], host: NDArray[np.int64]) -> Move:
        return self._begin(Move("store", host[:0], host.copy(), keys=tuple(keys)))

    def find(self, keys: Sequence[bytes]) -> Move:
        return self._begin(Move("find", np.empty(0, np.int64), np.empty(0, np.int64), keys=tuple(keys)))

    def fetch(self, keys: Sequence[bytes], host: NDArray[np.int64]) -> Move:
        return self._begin(Move("fetch", host[:0], host.copy(), keys=tuple(keys)))

    def cancel(self, job: Any) -> None:
        if not job.done:
            job.keys = job.keys[:0]
            if job.kind != "save":
                self._end(job)

    def wait(self, jobs: Sequence[Any], timeout: float) -> bool:
        for job in jobs:
            if not job.done:
                self._end(job)
        return True

    def advance(self, share: float = 0.5) -> None:
        """End some of the jobs, the oldest of each kind first."""
        for kind in ("save", "store", "find", "fetch"):
            for job in [one for one in self.jobs if one.kind == kind]:
                if self.random.random() > share:
                    break
                self._end(job)

    def _device(self) -> NDArray[np.int64]:
        return self.slots.reshape(-1, self.page_size)

    def _begin(self, move: Move) -> Move:
        self.jobs.append(move)
        return move

    def _end(self, move: Move) -> None:
        self.jobs.remove(move)
        if move.kind == "save":
            self.pages[move.host] = self._device()[move.device] if move.copied is None else move.copied
            move.result = move.host.shape[0]
            self.saved += move.result
        elif move.kind == "store":
            self.stored |= {key: self.pages[pages].copy() for key, pages in zip(move.keys, move.host, strict=False)}
            move.result = len(move.keys)
        else:
            for key in move.keys:
                if key not in self.stored:
                    break
                if move.kind == "fetch":
                    self.pages[move.host[move.result]] = self.stored[key]
                move.result += 1
        move.done = True


def loads_of(work: ModelWorkerBatch) -> tuple[PageLoad, ...]:
    """What the cache wants loaded for a batch."""
    found: Any = work.payloads.get(NAME, ())
    return tuple(found)


class LoadingModel(FakeModel):
    """Loads before it runs; of loads a share fails, with some of the pages written, `fail_loads`."""

    mover: SlotMover
    fail_loads = 0.0

    def __init__(self, rows: ReqToTokenPool, num_slots: int) -> None:
        super().__init__(rows, num_slots)
        self.loads: list[int] = []
        """Tokens of each load that was tried."""

    def __call__(self, work: ModelWorkerBatch) -> BatchResult:
        loads = loads_of(work)
        if loads and (work.part is None or work.part.first):
            self.loads += [load.host.shape[0] * self.mover.page_size for load in loads]
            device = self.slots.reshape(-1, self.mover.page_size)
            lost = self.mover.random.random() < self.fail_loads
            for load in loads:
                some = load.host.shape[0] // 2 if lost else load.host.shape[0]
                assert (self.mover.pages[load.host] != EMPTY).all(), "a page is loaded that was never saved"
                device[load.device[:some]] = self.mover.pages[load.host[:some]]
            if lost:
                if work.table is not None:
                    self.table.reshape(-1)[work.table.places] = work.table.slots
                raise StepLost("lost")
        return super().__call__(work)


class TierHarness(Harness):
    """Moves end between steps, `share` of them."""

    def __init__(
        self, host_tokens: int, *, page_size: int = 1, seed: int = 0, fail_loads: float = 0.0, **more: Any
    ) -> None:
        self.mover = SlotMover(host_tokens // page_size, page_size, seed=seed)
        self.share = 0.5
        super().__init__(
            **{"cache": "hiradix", "page_size": page_size, "model": LoadingModel, "mover": self.mover, **more}
        )
        assert isinstance(self.model, LoadingModel)
        self.model.mover, self.model.fail_loads = self.mover, fail_loads
        self.mover.slots = self.model.slots

    def step(self) -> list[TokenOutput]:
        self.mover.advance(self.share)
        return super().step()

    @property
    def loads(self) -> list[int]:
        """Tokens of each load that a batch has tried."""
        assert isinstance(self.model, LoadingModel)
        return self.model.loads
