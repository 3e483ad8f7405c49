"""The fake storage keeps the contract, until it is told not to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pegboard.plugins.kv_tiers.api import KVStorage, StorageError
from pegboard.plugins.kv_tiers.suite.kv_storage import KVStorageContract
from tests.fakes.storages import FakeStorage, FakeStorageOptions

FAR = float("inf")
KEY = b"k" * 32


class TestFakeStorage(KVStorageContract):
    factory = FakeStorage
    options_model = FakeStorageOptions
    provides = frozenset({"persistent", "shared"})

    def place(self, folder: Path) -> dict[str, str]:
        return {"place": str(folder)}

    def in_child(self, work: Callable[[], object]) -> None:
        """Its place is this process's memory."""
        work()

    def raw(self, storage: KVStorage, key: bytes) -> bytes | None:
        assert isinstance(storage, FakeStorage)
        return storage.place.blocks.get(key)

    def put_raw(self, storage: KVStorage, key: bytes, data: bytes | None) -> None:
        assert isinstance(storage, FakeStorage)
        if data is None:
            storage.place.lose([key])
        else:
            storage.place.blocks[key] = data


class TestFaults:
    def test_it_raises(self) -> None:
        storage = FakeStorage.make(4)
        storage.faults.only = ("get",)
        storage.faults.fail("no luck")
        assert storage.set([KEY], [memoryview(b"abcd")], FAR) == 1
        with pytest.raises(StorageError, match="no luck"):
            storage.get([KEY], [memoryview(bytearray(4))], FAR)
        storage.faults.mend()
        assert storage.get([KEY], [memoryview(bytearray(4))], FAR) == 1
        assert storage.faults.calls == {"set": 1, "get": 2}

    def test_it_hangs_until_released(self) -> None:
        storage = FakeStorage.make(4)
        storage.faults.hang()
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(storage.exists([KEY], 0.0)))
        thread.start()
        while not storage.faults.hanging:
            time.sleep(0.001)
        assert not found
        storage.faults.release()
        thread.join()
        assert (found, storage.faults.hanging) == ([0], 0)

    def test_it_is_slow(self) -> None:
        storage = FakeStorage.make(4)
        storage.faults.delay = 0.05
        began = time.monotonic()
        storage.exists([KEY], FAR)
        assert time.monotonic() - began >= 0.05

    def test_it_loses_blocks(self) -> None:
        storage = FakeStorage.make(4)
        keys = [bytes([n]) * 32 for n in range(3)]
        assert storage.set(keys, [memoryview(b"abcd")] * 3, FAR) == 3
        storage.place.lose(keys[1:2])
        assert storage.exists(keys, FAR) == 1
        storage.place.lose()
        assert storage.exists(keys, FAR) == 0

    def test_places_are_apart(self) -> None:
        one, other = FakeStorage.make(4), FakeStorage.make(4)
        assert one.set([KEY], [memoryview(b"abcd")], FAR) == 1
        assert other.exists([KEY], FAR) == 0
