"""The storage in Mooncake Store keeps the contract: over a fake in `make test`, over the real one where it is."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from pegboard.conformance.servers import free_ports
from pegboard.plugins.kv_tiers.api import KVStorage, KVStorageContext, StorageError
from pegboard.plugins.kv_tiers.suite.kv_storage import KVStorageContract
from pegboard.plugins.storage_mooncake.options import MooncakeOptions
from pegboard.plugins.storage_mooncake.storage import MooncakeStorage
from tests.plugins.storage_mooncake.fake_store import FakeMooncakeStore

FAR = float("inf")
IDENTITY = "ab" * 32
KEYS = [bytes([number]) * 32 for number in range(20)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> type[FakeMooncakeStore]:
    """What the plugin imports instead of Mooncake's library: a store that is empty."""

    class Fresh(FakeMooncakeStore):
        objects: dict[str, bytes] = {}
        calls: list[int] = []

    module = ModuleType("mooncake.store")
    vars(module)["MooncakeDistributedStore"] = Fresh
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    return Fresh


def name_of(storage: KVStorage, key: bytes) -> str:
    return f"pegboard:{storage.ctx.identity}:{key.hex()}"


class TestOverAFake(KVStorageContract):
    provider = "mooncake"
    options = {"segment_bytes": 0}
    objects: dict[str, bytes]

    @pytest.fixture(autouse=True)
    def _store(self, store: type[FakeMooncakeStore]) -> None:
        self.objects = store.objects

    def in_child(self, work: Callable[[], object]) -> None:
        """The fake is in this process's memory."""
        work()

    def raw(self, storage: KVStorage, key: bytes) -> bytes | None:
        return self.objects.get(name_of(storage, key))

    def put_raw(self, storage: KVStorage, key: bytes, data: bytes | None) -> None:
        if data is None:
            del self.objects[name_of(storage, key)]
        else:
            self.objects[name_of(storage, key)] = data


def opened(**options: object) -> MooncakeStorage:
    return MooncakeStorage(MooncakeOptions.model_validate(options), KVStorageContext(IDENTITY, 1000))


def put(storage: KVStorage) -> int:
    return storage.set(KEYS, [memoryview(bytes([n]) * 1000) for n in range(20)], FAR)


def test_a_full_store(store: type[FakeMooncakeStore]) -> None:
    """What it has no room for is dropped; that is not an error."""
    store.room = 7 * 1088
    storage = opened()
    assert put(storage) == 7
    assert storage.stats()["dropped"] == 1
    storage.close()


def test_a_master_that_is_away(store: type[FakeMooncakeStore], caplog: pytest.LogCaptureFixture) -> None:
    """The engine starts without it."""
    store.failing = True
    storage = opened(timeout=0.05)
    with pytest.raises(StorageError, match=r"master at 127\.0\.0\.1:50051 does not answer"):
        put(storage)
    assert "cannot be reached (-900); trying again" in caplog.text
    storage.close()


def test_codes_about_the_store(store: type[FakeMooncakeStore], monkeypatch: pytest.MonkeyPatch) -> None:
    storage = opened()
    put(storage)
    monkeypatch.setattr(store, "read", lambda *_: -900)
    with pytest.raises(StorageError, match="answers with -900"):
        storage.get(KEYS[:1], [memoryview(bytearray(1000))], FAR)
    monkeypatch.setattr(store, "read", lambda *_: -707)  # the lease ran out while it was being read
    assert storage.get(KEYS[:1], [memoryview(bytearray(1000))], FAR) == 0
    assert storage.exists(KEYS, FAR) == 20
    storage.close()


def test_what_it_lends_is_not_persistent() -> None:
    both = frozenset({"persistent", "shared"})
    assert MooncakeOptions().provides(both) == {"shared"}
    assert MooncakeOptions(segment_bytes=0).provides(both) == both


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr("pegboard.plugins.storage_mooncake.storage.library", refuse)
    reason = MooncakeStorage.supports(MooncakeOptions(), KVStorageContext(IDENTITY, 10))
    assert "apt-get install libibverbs1" in str(reason)


@pytest.fixture(scope="module")
def master() -> Iterator[str]:
    """Run Mooncake's master. Skips where its wheel is not installed."""
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"Mooncake is not installed: {error}")
    ports = free_ports(2)
    program = Path(str(module.__file__)).parent / "mooncake_master"
    words = [str(program), "--rpc_port", str(ports[0]), "--metrics_port", str(ports[1])]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 30
            while not listens(ports[0]):
                assert time.monotonic() < until, "mooncake_master does not start"
                time.sleep(0.05)
            yield f"127.0.0.1:{ports[0]}"
        finally:
            process.kill()


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.full
class TestOverMooncake(KVStorageContract):
    provider = "mooncake"
    options = {"segment_bytes": 256 << 20, "timeout": 30.0}

    @pytest.fixture(autouse=True)
    def _master(self, master: str) -> None:
        self.master = master

    def place(self, folder: Path) -> Mapping[str, str]:
        return {"master": self.master}
