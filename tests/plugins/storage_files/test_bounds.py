"""How many bytes the files take, and which of them go."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pegboard.plugins.kv_tiers.api import StorageError
from tests.plugins.storage_files.disks import BLOCK, IDENTITY, ON_DISK, Disk, mounted

Open = Callable[..., Disk]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Open]:
    """What opens a storage in one folder."""
    opened: list[Disk] = []

    def make(identity: str = IDENTITY, **options: object) -> Disk:
        opened.append(Disk(tmp_path / "kv", identity, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def used_at(disk: Disk, number: int, ago: float) -> None:
    """Let a block have been used so many seconds ago."""
    then = time.time() - ago
    os.utime(disk.path(number), (then, then))


def test_a_folder_that_cannot_be_made(disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """As below /proc, where root may write, but there is nothing to write to."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"cannot use /.*/kv: it cannot be made here; name another one in `dir`$"):
        disk()


def test_the_least_recently_used_go_first(disk: Open) -> None:
    one = disk(max_bytes=10 * ON_DISK)
    assert one.put(*range(10)) == 10
    assert one.which(range(10)) == list(range(10))
    assert one.read(0)
    assert one.put(1) == 1
    assert one.put(*range(10, 14)) == 4
    assert one.which(range(14)) == [0, 1, *range(6, 14)]
    assert (one.stat("bytes"), one.stat("evicted")) == (10 * ON_DISK, 4)
    assert len(one.files()) == 10


def test_a_block_may_be_written_that_was_removed(disk: Open) -> None:
    """In one call more than fits: it is not an error, and the bound holds all the time."""
    one = disk(max_bytes=5 * ON_DISK)
    for _ in range(3):
        assert one.put(*range(12)) == 12
        assert len(one.files()) <= 5


def test_several_go_at_once(disk: Open) -> None:
    """A large folder is not tidied with each block: 5% go together."""
    one = disk(max_bytes=100 * ON_DISK)
    one.put(*range(101))
    assert one.stat("blocks") == 100 - 5


def test_a_restart_knows_the_order(disk: Open) -> None:
    one = disk()
    one.put(*range(8))
    for number in range(8):
        used_at(one, number, 100 + 10 * (number * 3 % 8))  # 5 is the one used last, 0, then 3, 6, 1, 4, 7, 2
    two = disk(max_bytes=8 * ON_DISK)
    assert (two.stat("blocks"), two.stat("bytes")) == (8, 8 * ON_DISK)
    oldest = sorted(range(8), key=lambda number: number * 3 % 8)[::-1]
    two.put(50, 51)
    assert two.which(range(8)) == sorted(oldest[2:])


def test_other_models_make_room(disk: Open) -> None:
    old = disk("cd" * 32)
    old.put(*range(6))
    new = disk(max_bytes=8 * ON_DISK)
    assert new.put(*range(6)) == 6
    assert new.which(range(6)) == list(range(6))
    assert len(old.which(range(6))) == 2
    assert new.put(*range(6, 8)) == 2
    assert not (new.folder / ("cd" * 32)).exists(), "its empty folders are left"


def test_what_another_server_uses_stays(disk: Open) -> None:
    """Its use shows in the file's time alone."""
    one = disk(max_bytes=6 * ON_DISK)
    one.put(*range(6))
    used_at(one, 0, -50)
    used_at(one, 2, -60)
    one.put(10, 11)
    assert one.which([*range(6), 10, 11]) == [0, 2, 4, 5, 10, 11]


@pytest.mark.full
def test_two_servers_keep_to_one_bound(disk: Open) -> None:
    """Each learns, at times, of what the other writes; until then a twentieth may be too much."""
    one, two = disk(max_bytes=60 * ON_DISK), disk(max_bytes=60 * ON_DISK)
    for round_ in range(30):
        for server, first in ((one, 0), (two, 1000)):
            before = server.stat("scans")
            server.put(*range(first + 4 * round_, first + 4 * round_ + 4))
            server.await_scans(int(before) + 1)
        assert len(one.files()) <= 60 + 8
    assert len(one.files()) > 40


def test_one_server_removes_at_a_time(disk: Open) -> None:
    """While another one does, blocks are dropped, which is not an error; one that died lets go."""
    one = disk(max_bytes=4 * ON_DISK)
    one.put(*range(4))
    other = os.open(one.folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert one.put(10, 11) == 0
    assert one.read(3)
    assert (one.stat("dropped"), one.stat("evicted")) == (1, 0)
    os.close(other)
    assert one.put(10, 11) == 2


def test_what_cannot_be_removed_is_left_alone(disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    one = disk(max_bytes=6 * ON_DISK)
    one.put(*range(6))
    unlink, tried = os.unlink, list[str]()
    kept = {one.path(0).name, one.path(2).name}

    def refuse(name: str, *, dir_fd: int) -> None:
        if name in kept:
            tried.append(name)
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    for number in range(10, 30):
        assert one.put(number) == 1
        assert len(one.files()) <= 6
    assert sorted(tried) == sorted(kept), "it is tried again and again"
    assert one.stat("stuck") == 2
    assert one.read(0)
    kept |= {path.name for path in one.files()}
    assert one.put(40) == 0, "nothing can be removed, so there is no room"
    assert (one.stat("blocks"), one.stat("dropped")) == (6, 1)


def test_it_leaves_room_on_the_disk(disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """What others write counts there; blocks go, the oldest first, and at last no more are written."""
    one = disk(min_free=0.25, max_bytes=1 << 40)
    one.put(*range(20))
    real = os.fstatvfs

    def left(blocks: int) -> None:
        """Let the disk have room for 100 blocks, of which so many were free with 20 of ours on it."""

        def found(fd: int) -> os.statvfs_result:
            about = list(real(fd))
            about[0:5] = [ON_DISK, ON_DISK, 100, blocks + 20 - len(one.files()), blocks + 20 - len(one.files())]
            return os.statvfs_result(about)

        monkeypatch.setattr(os, "fstatvfs", found)

    left(40)
    assert one.put(50) == 1
    assert one.stat("evicted") == 0
    left(20)
    assert one.put(51) == 1
    assert not one.which(range(6))
    left(2)
    assert one.put(52) == 0
    assert one.stat("blocks") == 0


def test_unset_it_takes_half_of_what_is_free(disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(blocks: int) -> None:
        about = (ON_DISK, ON_DISK, 10**9, blocks, blocks, 0, 0, 0, 0, 255)
        monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result(about))

    free(1000)
    one = disk()
    assert one.stat("limit_bytes") == 500 * ON_DISK
    one.put(*range(100))
    free(900)
    assert disk().stat("limit_bytes") == 500 * ON_DISK, "what it holds itself is free for it"
    free(10**8)
    assert disk().stat("limit_bytes") == 20 * 10**9


class TestFullDisk:
    def test_files_make_room(self, tmp_path: Path) -> None:
        """There are fewer inodes than blocks, which no figure tells before."""
        with mounted(tmp_path / "small", "size=4m,nr_inodes=100"):
            one = Disk(tmp_path / "small")
            assert one.put(*range(60)) == 60
            assert len(one.files()) < 40
            assert one.which([58, 59]) == [58, 59]
            one.close()

    def test_bytes_make_room(self, tmp_path: Path) -> None:
        with mounted(tmp_path / "small", "size=256k"):
            one = Disk(tmp_path / "small", max_bytes=1 << 30)
            (tmp_path / "small" / "rubbish").write_bytes(bytes(100 * 1024))
            assert one.put(*range(100)) == 100
            assert one.stat("evicted") >= 100 - 156 * 1024 // ON_DISK
            assert one.read(99)
            one.close()

    def test_one_more_try(self, disk: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        one = disk(max_bytes=100 * ON_DISK)
        one.put(*range(50))
        writev, fail = os.writev, [errno.EDQUOT]

        def full(fd: int, parts: list[memoryview]) -> int:
            if fail:
                raise OSError(fail[0] if fail[0] == errno.ENOSPC else fail.pop(), "full")
            return writev(fd, parts)

        monkeypatch.setattr(os, "writev", full)
        assert one.put(60) == 1
        assert one.read(60)
        assert one.stat("evicted") == 3
        fail.append(errno.ENOSPC)
        with pytest.raises(StorageError, match=r"cannot write to .*kv: full"):
            one.put(61)
        monkeypatch.undo()
        assert one.stat("evicted") == 6
        assert len(one.files()) == 45, "a temporary file is left"
        assert one.put(61) == 1
        assert one.read(61)

    def test_read_only(self, tmp_path: Path) -> None:
        with mounted(tmp_path / "small", "size=1m"):
            one = Disk(tmp_path / "small")
            one.put(1)
            subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "small")], check=True)
            with pytest.raises(StorageError, match=r"cannot write to .*small: Read-only file system"):
                one.put(2)
            assert one.put(1) == 1
            assert one.read(1)
            objection = one.storage.supports(one.storage.options, one.storage.ctx)
            assert objection is not None
            assert "is read-only" in objection
            assert "name another one in `dir`" in objection
            one.close()


def test_a_bound_below_a_block_is_refused(disk: Open) -> None:
    one = disk()
    options = one.storage.options.model_copy(update={"max_bytes": BLOCK})
    assert "make it at least 4096" in str(one.storage.supports(options, one.storage.ctx))
