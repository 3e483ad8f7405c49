"""Several processes write, read, delete, clear and evict at once: whatever the order of their calls, it comes right."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pegboard.plugins.kv_tiers.api import KVStorageContext
from pegboard.plugins.storage_files.folders import Folders, Place
from pegboard.plugins.storage_files.index import Index
from pegboard.plugins.storage_files.options import FilesOptions
from pegboard.plugins.storage_files.room import Room
from pegboard.plugins.storage_files.storage import FilesStorage
from tests.plugins.storage_files.disks import BLOCK, FAR, IDENTITY, ON_DISK, Disk
from tests.plugins.storage_files.steps import Running, every_order, stopping

ONE, TWO = (b"\xab\xcd" + bytes([number]) * 30 for number in (1, 2))
"""Keys whose files are in one folder."""
BESIDE = b"\xab\xce" + bytes(30)
"""A key whose file is in the folder beside it."""
KEYS = (ONE, TWO, BESIDE)


class Server:
    """A storage in the folder that several share, as another process has it."""

    def __init__(self, folder: Path) -> None:
        self._disk = Disk(folder)
        self.storage = self._disk.storage
        self._folders, self._index = Folders(folder), Index()
        self._room = Room(FilesOptions(max_bytes=1 << 30), self._folders, self._index, time.monotonic)
        self._room.scanned.set()

    def put(self, key: bytes) -> bool:
        return self.storage.set([key], [memoryview(content(key))], FAR) == 1

    def read(self, key: bytes) -> bool:
        out = bytearray(BLOCK)
        found = self.storage.get([key], [memoryview(out)], FAR) == 1
        assert not found or out == content(key), "other bytes than those written"
        return found

    def delete(self, key: bytes) -> None:
        self.storage.delete([key])

    def evict(self) -> None:
        """Remove a block, as when the file system is full."""
        self._room.make_more(BLOCK, FAR)

    def search(self) -> int:
        """Look for files, as is done from time to time, and for what crashes have left."""
        return len(list(self._folders.walk(lambda: False)))

    def know(self, key: bytes) -> None:
        """Take note of the one block to evict."""
        self._index.drop_all(IDENTITY)
        self._index.use(Place(IDENTITY, key.hex()), ON_DISK)

    def close(self) -> None:
        self._folders.close()
        self._disk.close()


def content(key: bytes) -> bytes:
    return (key * BLOCK)[:BLOCK]


def path_of(folder: Path, key: bytes) -> Path:
    place = Place(IDENTITY, key.hex())
    return folder.joinpath(*place.folders, place.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "kv"


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[Server]]:
    found = [Server(folder) for _ in range(3)]
    with stopping():
        yield found
    for server in found:
        server.close()


class Case(NamedTuple):
    """What several servers do at once, from which blocks on; which are there at the end, and which are not."""

    at_first: tuple[bytes, ...]
    operations: tuple[Callable[[list[Server]], object], ...]
    there: tuple[bytes, ...] = ()
    gone: tuple[bytes, ...] = ()


def put(server: int, key: bytes = ONE) -> Callable[[list[Server]], object]:
    return lambda servers: servers[server].put(key)


def delete(server: int, key: bytes = ONE) -> Callable[[list[Server]], object]:
    return lambda servers: servers[server].delete(key)


def read(server: int) -> Callable[[list[Server]], object]:
    return lambda servers: servers[server].read(ONE)


def clear(server: int) -> Callable[[list[Server]], object]:
    return lambda servers: servers[server].storage.clear()


def evict(server: int) -> Callable[[list[Server]], object]:
    return lambda servers: servers[server].evict()


def search(server: int) -> Callable[[list[Server]], object]:
    return lambda servers: servers[server].search()


CASES = {
    "two write": Case((BESIDE,), (put(0), put(1)), (ONE, BESIDE)),
    "write and delete": Case((ONE,), (put(0), delete(1))),
    "write where a folder goes": Case((TWO,), (put(0), delete(1, TWO)), (ONE,), (TWO,)),
    "write and clear": Case((TWO,), (put(0), clear(1)), (), (TWO,)),
    "write and evict": Case((TWO,), (put(0), evict(2)), (ONE,), (TWO,)),
    "write and search": Case((TWO,), (put(0), search(1)), (ONE, TWO)),
    "read and delete": Case((ONE,), (read(0), delete(1)), (), (ONE,)),
    "read and write": Case((), (read(0), put(1)), (ONE,)),
    "read and evict": Case((ONE,), (read(0), evict(2)), (), (ONE,)),
    "two delete the same": Case((ONE,), (delete(0), delete(1)), (), (ONE,)),
    "two delete": Case((ONE, TWO, BESIDE), (delete(0), delete(1, BESIDE)), (TWO,), (ONE, BESIDE)),
    "two delete the last": Case((ONE, BESIDE), (delete(0), delete(1, BESIDE)), (), (ONE, BESIDE)),
    "delete and clear": Case((ONE, TWO), (delete(0), clear(1)), (), (ONE, TWO)),
    "two clear": Case((ONE,), (clear(0), clear(1)), (), (ONE,)),
}
LONG = {
    "the first two write": Case((), (put(0), put(1)), (ONE,)),
    "the first two write beside each other": Case((), (put(0), put(1, BESIDE)), (ONE, BESIDE)),
    "two clear more": Case((ONE, BESIDE), (clear(0), clear(1)), (), (ONE, BESIDE)),
    "three delete": Case(KEYS, (delete(0), delete(1, TWO), delete(2, BESIDE)), (), KEYS),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in LONG)])
def test_at_once(name: str, servers: list[Server], folder: Path) -> None:
    at_first, operations, there, gone = {**CASES, **LONG}[name]

    def prepare() -> None:
        start_with(servers, at_first)

    for results in every_order(folder, prepare, [functools.partial(do, servers) for do in operations]):
        assert not [result for result in results if isinstance(result, Exception)], results
        assert all(servers[0].read(key) and servers[1].read(key) for key in there), "a block that was written is gone"
        assert not any(servers[0].read(key) or servers[1].read(key) for key in gone), "a removed block is there"
        left = sorted(path for path in folder.rglob("*") if not path.is_dir())
        assert left == sorted(path_of(folder, key) for key in KEYS if servers[0].read(key)), "other files are left"
        assert left or not list(folder.iterdir()), "empty folders are left"


def start_with(servers: list[Server], keys: tuple[bytes, ...]) -> None:
    """Let these blocks be there, and no others."""
    for server in servers:
        for key in KEYS:
            server.delete(key)
    for key in keys:
        assert servers[2].put(key)
        servers[2].know(key)


@pytest.mark.parametrize(("every", "first"), [(every, first) for every in range(1, 7) for first in range(every)])
def test_folders_go_again_and_again(servers: list[Server], every: int, first: int) -> None:
    """While one server writes a block, another writes and deletes the only other one twenty times, each time with all
    of its folders: before every call, or every second one, and so on.
    """
    start_with(servers, ())
    running, calls, left = Running(lambda: servers[0].put(ONE), 0), 0, 20
    while not running.ended:
        if left and calls % every == first:
            left -= servers[1].put(TWO)
            servers[1].delete(TWO)
        running.step()
        calls += 1
    running.finish()
    assert running.result is True
    assert servers[1].read(ONE)


def test_no_write_outlives_its_deadline(servers: list[Server], folder: Path) -> None:
    """One that others thwart until then is no error: it returns what it has done."""
    start_with(servers, ())
    times = iter((0.0, 1.0, 2.0, 3.0))
    storage = FilesStorage(servers[0].storage.options, KVStorageContext(IDENTITY, BLOCK, lambda: next(times)))
    running = Running(lambda: storage.set([ONE], [memoryview(content(ONE))], 2.5), 0)
    while not running.ended:
        shutil.rmtree(folder / IDENTITY, ignore_errors=True)
        running.step()
    running.finish()
    storage.close()
    assert running.result == 0
    assert next(times, None) is None


def in_a_folders_place(path: Path) -> None:
    path.parent.parent.mkdir(parents=True)
    path.parent.symlink_to(path.parent.parent)


def in_the_blocks_place(path: Path) -> None:
    (path / "something").mkdir(parents=True)


@pytest.mark.full
@pytest.mark.parametrize("damage", [in_a_folders_place, in_the_blocks_place])
def test_two_meet_the_same_damage(servers: list[Server], folder: Path, damage: Callable[[Path], None]) -> None:
    """One does not take away what the other has put in its place."""

    def prepare() -> None:
        start_with(servers, ())
        shutil.rmtree(folder / IDENTITY, ignore_errors=True)
        damage(path_of(folder, ONE))

    for results in every_order(folder, prepare, [lambda: servers[0].put(ONE), lambda: servers[1].put(ONE)]):
        assert results == [True, True]
        assert servers[0].read(ONE)
        assert servers[1].read(ONE)
