"""A mover with a small host pool and storages that fail on demand, on a clock that the test turns."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pegboard.conformance.attention.batches import make_layer
from pegboard.conformance.rig.paged import PlainPool
from pegboard.core.interfaces.kv_pool import KVPool, KVPoolContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.kv_tiers import mover as mover_module
from pegboard.plugins.kv_tiers import tier_store
from pegboard.plugins.kv_tiers.api import HostPool, HostPoolContext, KVStorageContext
from pegboard.plugins.kv_tiers.mover import LocalMover
from tests.fakes.storages import FakeStorage, FakeStorageOptions

LAYER = make_layer(2, 1, 4)
PAGE_SIZE, PAGES, BLOCK_PAGES = 2, 400, 2
DTYPE, CPU = torch.float32, torch.device("cpu")
PLACES = itertools.count()


def until(true: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait for what another thread is about to do."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ToyHost(HostPool[NoOptions]):
    """A page is a row of bytes; `gate` holds saves up, `error` is what each call raises."""

    def __init__(self, *, views: bool) -> None:
        super().__init__(NoOptions(), HostPoolContext(PAGES, PAGE_SIZE, (LAYER,), DTYPE, CPU, BLOCK_PAGES))
        self.pages = np.zeros((PAGES + 1, self.block_bytes // BLOCK_PAGES), np.uint8)
        self.views = views
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.saves: list[int] = []

    def save(self, pool: KVPool, device: torch.Tensor, host: torch.Tensor) -> None:
        self._meet()
        self.saves.append(host.shape[0])
        self.gate.wait()
        rows = [buffer(0).view(PAGES + 1, -1)[device] for buffer in (pool.keys, pool.values)]
        self.pages[host.numpy()] = torch.cat(rows, dim=1).numpy().view(np.uint8)

    def load(self, pool: KVPool, layer_id: int, host: torch.Tensor, device: torch.Tensor) -> None:
        raise AssertionError("a mover does not load")

    def write_block(self, host: torch.Tensor, out: memoryview) -> None:
        self._meet()
        np.frombuffer(out, np.uint8)[:] = self.pages[host.numpy()].reshape(-1)

    def read_block(self, data: memoryview, host: torch.Tensor) -> None:
        self._meet()
        self.pages[host.numpy()] = np.frombuffer(data, np.uint8).reshape(BLOCK_PAGES, -1)

    def view_block(self, host: torch.Tensor) -> memoryview | None:
        first, *rest = host.tolist()
        if not self.views or rest != list(range(first + 1, first + BLOCK_PAGES)):
            return None
        return self.pages[first : first + BLOCK_PAGES].reshape(-1).data

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes

    def _meet(self) -> None:
        if self.error is not None:
            raise self.error


class Rig:
    """A mover over one host pool and `stores` fake storages. Two blocks are a piece, three pages are copied at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stores: int = 1, *, views: bool = False, **more: Any) -> None:
        self.host = ToyHost(views=views)
        monkeypatch.setattr(tier_store, "PIECE_BYTES", 2 * self.host.block_bytes)
        monkeypatch.setattr(mover_module, "COPY_BYTES", {"cpu": 3 * self.host.block_bytes // BLOCK_PAGES})
        self.clock = Clock()
        self.pool = PlainPool(NoOptions(), KVPoolContext(PAGES, PAGE_SIZE, (LAYER,), DTYPE, CPU))
        for buffer in (self.pool.keys(0), self.pool.values(0)):
            buffer[:] = torch.randn(buffer.shape)
        self.storages = [self._storage() for _ in range(stores)]
        named = [(f"store{number}", storage) for number, storage in enumerate(self.storages)]
        self.mover = LocalMover(self.pool, self.host, named, clock=self.clock, **more)

    def _storage(self) -> FakeStorage:
        options = FakeStorageOptions(place=f"rig {next(PLACES)}")
        return FakeStorage(options, KVStorageContext("ab", self.host.block_bytes, self.clock))

    def close(self) -> None:
        for storage in self.storages:
            storage.faults.mend()
        assert self.mover.close() == ()

    # ---- moves ------------------------------------------------------------------------------------------------------

    def ended(self, job: Any) -> tuple[int, str]:
        assert self.mover.wait([job], 10), "the job does not end"
        return job.result, job.error

    def fill(self, keys: Sequence[bytes], store: int = 0, first: int = 1) -> NDArray[np.uint8]:
        """Store random blocks under these keys; what they hold, uint8 [blocks, block_bytes]."""
        pages = blocks(len(keys), first)
        self.host.pages[pages] = np.random.default_rng(len(keys)).integers(0, 256, (*pages.shape, 1), np.uint8)
        expected = self.block(pages)
        assert self.ended(self.mover.store(store, keys, pages)) == (len(keys), "")
        self.host.pages[:] = 0
        return expected

    def block(self, pages: NDArray[np.int64]) -> NDArray[np.uint8]:
        return self.host.pages[pages].reshape(pages.shape[0], -1)

    def hang(self, store: int = 0, *, probe: bool = False) -> Any:
        """Have a fetch hang in a storage, and abandon it."""
        faults = self.storages[store].faults
        faults.hang()
        before = faults.hanging
        job = self.mover.fetch(names(1), blocks(1))
        until(lambda: faults.hanging > before)
        self.clock.now += 6.5
        self.mover.supervise()
        return job


def names(count: int, first: int = 0) -> list[bytes]:
    return [b"%032d" % number for number in range(first, first + count)]


def blocks(count: int, first: int = 1) -> NDArray[np.int64]:
    """Host pages [count, BLOCK_PAGES] from `first` on."""
    return np.arange(first, first + count * BLOCK_PAGES).reshape(count, BLOCK_PAGES)
