"""What files may be, and what the system may do to them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pegboard.plugins.kv_tiers.api import KVStorageContext, StorageError
from pegboard.plugins.storage_files import storage as storage_module
from pegboard.plugins.storage_files.options import FilesOptions
from pegboard.plugins.storage_files.storage import FilesStorage
from pegboard.toolkit.cache.block_frames import BlockFrames
from tests.plugins.storage_files.disks import BLOCK, FAR, IDENTITY, ON_DISK, Disk, block, key


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    one = Disk(tmp_path / "kv")
    yield one
    one.close()


class TestLayout:
    def test_where_a_block_is(self, disk: Disk) -> None:
        disk.put(7)
        name = key(7).hex()
        path = disk.folder / IDENTITY / name[:2] / name[2:4] / name
        assert disk.files() == [path]
        assert path.read_bytes() == BlockFrames(IDENTITY, BLOCK).header(key(7), block(7)) + block(7)

    def test_nobody_else_may_look(self, disk: Disk) -> None:
        disk.put(7)
        paths = [disk.path(7), *list(disk.path(7).parents)[:4]]
        assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600, 0o700, 0o700, 0o700, 0o700]

    def test_removing_leaves_no_folders(self, disk: Disk) -> None:
        disk.put(*range(10))
        disk.storage.delete([key(3)])
        assert not disk.path(3).parent.exists()
        disk.storage.clear()
        assert [path.name for path in disk.folder.iterdir()] == []

    def test_what_is_not_ours_stays(self, disk: Disk) -> None:
        disk.put(1)
        theirs = [disk.folder / "notes.txt", disk.path(1).parent / "README", disk.folder / "abcd" / "ef" / "gh"]
        for path in theirs:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("mine")
        again = Disk(disk.folder, max_bytes=4096)
        again.put(2)
        again.storage.clear()
        again.close()
        assert all(path.exists() for path in theirs)

    def test_the_default_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PEGBOARD_CACHE", str(tmp_path))
        storage = FilesStorage(FilesOptions(), KVStorageContext(IDENTITY, 4))
        storage.close()
        assert (tmp_path / "kv").is_dir()

    def test_an_identity_is_no_path(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="hexadecimal"):
            FilesStorage(FilesOptions(dir=str(tmp_path)), KVStorageContext("../ab", 4))


class TestLinks:
    """They lead nowhere."""

    def test_a_link_in_a_blocks_place(self, disk: Disk, tmp_path: Path) -> None:
        disk.put(1)
        elsewhere = tmp_path / "elsewhere"
        shutil.move(disk.path(1), elsewhere)
        disk.path(1).symlink_to(elsewhere)
        assert not disk.which([1])
        assert not disk.read(1)
        assert not disk.path(1).is_symlink()
        disk.path(1).parent.mkdir(parents=True, exist_ok=True)
        disk.path(1).symlink_to(elsewhere)
        before = elsewhere.read_bytes()
        assert disk.put(1) == 1
        assert not disk.path(1).is_symlink()
        assert elsewhere.read_bytes() == before

    @pytest.mark.parametrize("depth", [0, 1, 2])
    def test_a_link_in_a_folders_place(self, disk: Disk, tmp_path: Path, depth: int) -> None:
        disk.put(1)
        folder = list(disk.path(1).parents)[depth]
        elsewhere = tmp_path / "elsewhere"
        shutil.move(folder, elsewhere)
        folder.symlink_to(elsewhere)
        before = sorted(elsewhere.rglob("*"))
        assert not disk.read(1)
        assert not folder.is_symlink()
        assert disk.put(1) == 1
        assert disk.read(1)
        disk.storage.clear()
        assert sorted(elsewhere.rglob("*")) == before
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(elsewhere)
        again = Disk(disk.folder)
        assert again.stat("blocks") == 0
        again.close()

    def test_a_link_to_the_folder_is_the_operators(self, disk: Disk, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(disk.folder)
        other = Disk(tmp_path / "link")
        other.put(1)
        other.close()
        assert disk.read(1)


class TestOddFiles:
    def test_a_pipe_does_not_hang(self, disk: Disk) -> None:
        disk.put(1)
        disk.path(1).unlink()
        os.mkfifo(disk.path(1))
        assert not disk.read(1)
        assert not disk.path(1).exists()

    @pytest.mark.parametrize("full", [False, True])
    @pytest.mark.parametrize("call", ["read", "put", "delete", "clear", "evict"])
    def test_a_folder_in_a_blocks_place(self, disk: Disk, call: str, full: bool) -> None:
        """It goes, whatever meets it; what is in it is kept under another name."""
        disk.put(1)
        small = Disk(disk.folder, max_bytes=ON_DISK)
        disk.path(1).unlink()
        disk.path(1).mkdir()
        if full:
            (disk.path(1) / "note").write_text("mine")
        assert not disk.which([1])
        if call == "read":
            assert not disk.read(1)
        elif call == "put":
            assert disk.put(1) == 1
        elif call == "delete":
            disk.storage.delete([key(1)])
        elif call == "clear":
            disk.storage.clear()
        else:
            assert small.put(2) == 1
            assert (small.stat("evicted"), small.stat("stuck")) == (1, 0)
        small.close()
        assert not disk.path(1).is_dir()
        assert disk.put(1, 2) == 2
        assert disk.read(1)
        kept = list(disk.folder.glob("*/*/*/.bad-*/note"))
        assert [path.read_text() for path in kept] == ["mine"] * full

    @pytest.mark.parametrize("depth", [0, 1, 2])
    @pytest.mark.parametrize("kind", [Path.touch, os.mkfifo])
    def test_a_file_in_a_folders_place(self, disk: Disk, depth: int, kind: Callable[[Path], None]) -> None:
        disk.put(1)
        folder = list(disk.path(1).parents)[depth]
        for call in (disk.read, disk.put):
            shutil.rmtree(folder)
            kind(folder)
            assert not disk.which([1])
            assert call(1) == (call == disk.put)
            assert disk.put(1) == 1
            assert disk.read(1)

    def test_what_cannot_be_removed_costs_its_key(
        self, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As a place where something is mounted."""
        disk.path(1).mkdir(parents=True)
        monkeypatch.setattr(os, "rmdir", refusing(errno.EBUSY))
        assert disk.put(2, 1, 3) == 1
        assert disk.put(3) == 1
        assert not disk.read(1)
        assert disk.stat("dropped") == 1
        assert f"the block {key(1).hex()} in {disk.folder} cannot be written: Is a directory" in caplog.text

    def test_a_bad_sector_is_a_miss(self, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
        disk.put(1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refusing(errno.EIO))
            assert not disk.read(1)
        assert disk.stat("damaged") == 1
        assert not disk.files()

    def test_one_that_may_not_be_read_is_told(self, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
        disk.put(1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refusing(errno.EACCES))
            with pytest.raises(StorageError, match=r"cannot read from .*kv"):
                disk.read(1)
        assert disk.read(1)

    def test_calls_that_do_less(self, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
        """As a signal or a network's file system may make them."""
        writev, preadv = os.writev, os.preadv
        monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, [parts[0][:61]]))
        monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: preadv(fd, [parts[0][:70]], offset))
        disk.put(1)
        assert disk.read(1)


def refusing(number: int) -> object:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


class TestTime:
    @pytest.mark.parametrize(("ago", "touched"), [(7200, True), (600, False)])
    def test_a_files_time_is_its_use_within_an_hour(self, disk: Disk, ago: float, touched: bool) -> None:
        disk.put(1)
        then = time.time() - ago
        os.utime(disk.path(1), (then, then))
        assert disk.read(1)
        assert (disk.path(1).stat().st_mtime > then + 300) == touched

    def test_old_temporary_files_go_at_the_start(self, disk: Disk) -> None:
        disk.put(1)
        old, new = (disk.path(1).parent / f".new-{letter * 16}" for letter in "ab")
        for path, ago in ((old, 3700), (new, 3000)):
            path.write_bytes(b"half")
            os.utime(path, (time.time() - ago,) * 2)
        Disk(disk.folder).close()
        assert disk.files() == sorted([new, disk.path(1)])

    @pytest.mark.parametrize("hours", [-3, 3])
    def test_they_go_by_the_file_systems_clock(self, disk: Disk, monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
        """This machine's may be another one, or be set while a file is being written."""
        disk.put(1)
        old, new = (disk.path(1).parent / f".new-{letter * 16}" for letter in "ab")
        for path, ago in ((old, 3700), (new, 3000)):
            path.write_bytes(b"half")
            os.utime(path, (time.time() - ago,) * 2)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + hours * 3600)
        Disk(disk.folder).close()
        assert disk.files() == sorted([new, disk.path(1)])

    def test_what_another_server_is_writing_survives_clear(self, disk: Disk) -> None:
        disk.put(1)
        old, new = (disk.path(1).parent / f".new-{letter * 16}" for letter in "ab")
        for path in (old, new):
            path.write_bytes(b"half")
        os.utime(old, (time.time() - 3700,) * 2)
        disk.storage.clear()
        assert disk.files() == [new]


class TestFolder:
    def test_a_folder_that_vanished(self, disk: Disk) -> None:
        """It may be a mount that is away, so it is not made again; once it is back, it is used again."""
        disk.put(1)
        shutil.rmtree(disk.folder)
        assert not disk.read(1)
        assert not disk.which([1])
        with pytest.raises(StorageError, match="it is gone; make the folder again"):
            disk.put(1)
        disk.storage.delete([key(1)])
        disk.storage.clear()
        assert not disk.folder.exists()
        disk.folder.mkdir()
        assert disk.put(1) == 1
        assert disk.read(1)

    def test_folders_below_may_vanish(self, disk: Disk) -> None:
        disk.put(1)
        shutil.rmtree(disk.folder / IDENTITY)
        assert not disk.read(1)
        assert disk.put(1) == 1
        assert disk.read(1)

    def test_fsync(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        synced: list[int] = []
        monkeypatch.setattr(os, "fsync", synced.append)
        for fsync, calls in ((False, 0), (True, 2)):
            one = Disk(tmp_path / str(fsync), fsync=fsync)
            one.put(1)
            one.close()
            assert len(synced) == calls


class TestSupports:
    def objection(self, folder: Path) -> str:
        return str(FilesStorage.supports(FilesOptions(dir=str(folder)), KVStorageContext(IDENTITY, BLOCK)))

    def test_it_changes_nothing(self, tmp_path: Path) -> None:
        assert self.objection(tmp_path / "a" / "b") == "None"
        assert self.objection(tmp_path) == "None"
        assert list(tmp_path.iterdir()) == []

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert "is not a folder; name another one" in self.objection(tmp_path / "file")
        assert "cannot be made in" in self.objection(tmp_path / "file" / "kv")
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        assert "is not a folder" in self.objection(tmp_path / "link")

    def test_a_link_in_the_identitys_place(self, tmp_path: Path) -> None:
        (tmp_path / IDENTITY).symlink_to(tmp_path)
        assert "is a link, which is not followed; remove it" in self.objection(tmp_path)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")
    def test_rights(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        assert "belongs to another user" in self.objection(tmp_path)
        assert "cannot be made in" in self.objection(tmp_path / "kv")
        tmp_path.chmod(0o700)


def test_close_does_not_wait_for_a_mount_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(storage_module, "CLOSE_SECONDS", 0.2)
    back, scandir = threading.Event(), os.scandir

    def away(path: Any) -> Any:
        if threading.current_thread().name == "pegboard-files":
            back.wait(60)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", away)
    storage = FilesStorage(FilesOptions(dir=str(tmp_path), min_free=0), KVStorageContext(IDENTITY, BLOCK))
    storage.close()
    assert "its search is left behind" in caplog.text
    back.set()


WRITER = """
import sys
from pathlib import Path
from tests.plugins.storage_files.disks import Disk
disk = Disk(Path(sys.argv[1]))
print("begun", flush=True)
while True:
    for number in range(200):
        disk.put(number)
        disk.storage.delete([bytes(32)])
        if number % 7 == 3:
            disk.path(number).unlink()
"""


@pytest.mark.full
def test_killed_while_it_writes(tmp_path: Path) -> None:
    """Whatever is there afterwards is whole."""
    for round_ in range(3):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "kv")], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            until = time.monotonic() + 60
            while time.monotonic() < until and not [*(tmp_path / "kv" / IDENTITY).glob("*/*/*")]:
                time.sleep(0.005)
            time.sleep(0.05 + 0.02 * round_)
            writer.send_signal(signal.SIGKILL)
        again = Disk(tmp_path / "kv")
        found = again.which(range(200))
        assert found
        assert [again.read(number) for number in found] == [True] * len(found)
        assert again.stat("damaged") == 0
        assert again.storage.set([key(0)], [memoryview(block(0))], FAR) == 1
        again.close()
