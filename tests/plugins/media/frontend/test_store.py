"""The store's files and bytes against a plain model, and folders that dead processes have left."""

from __future__ import annotations

import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from pegboard.core.interfaces.errors import InvalidRequest, PegboardError
from pegboard.plugins.media.frontend.store import LARGE, Gone, MediaFile, MediaStore
from pegboard.toolkit.system.scratch import PREFIX, new_directory, remove_directory

MOST = 100


class StoreMachine(RuleBasedStateMachine):
    """Users of files come and go; a file that has none is gone, and its bytes with it."""

    users = Bundle("users")

    def __init__(self) -> None:
        super().__init__()
        self.parent = Path(tempfile.mkdtemp())
        self.store = MediaStore(self.parent / f"{PREFIX}x", MOST)
        self.model: dict[MediaFile, tuple[int, int]] = {}
        """Users and bytes of each file that should be there."""
        self.closed = False

    @initialize(target=users)
    def first(self) -> MediaFile:
        return self._created()

    @rule(target=users)
    def create(self) -> MediaFile:
        if self.closed:
            with pytest.raises(InvalidRequest):
                self.store.create()
            return MediaFile(self.store, "none")
        return self._created()

    def _created(self) -> MediaFile:
        file = self.store.create()
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
        self.model[file] = (1, 0)
        return file

    @rule(target=users, file=users)
    def keep(self, file: MediaFile) -> MediaFile:
        file.keep()
        if file in self.model:
            self.model[file] = (self.model[file][0] + 1, self.model[file][1])
        return file

    @rule(file=consumes(users))
    def drop(self, file: MediaFile) -> None:
        file.drop()
        if file in self.model:
            users, size = self.model.pop(file)
            if users > 1:
                self.model[file] = (users - 1, size)

    @rule(file=users, size=st.integers(0, 60))
    def take(self, file: MediaFile, size: int) -> None:
        if file not in self.model:
            with pytest.raises(Gone):
                file.take(size)
        elif self.total + size > MOST:
            with pytest.raises(InvalidRequest) as caught:
                file.take(size)
            assert caught.value.status == 503
        else:
            file.take(size)
            self._sized(file, self.model[file][1] + size)

    @rule(file=users, most=st.integers(0, 150))
    def take_some(self, file: MediaFile, most: int) -> None:
        taken = file.take_some(most)
        assert taken == min(most, MOST - self.total)
        self._sized(file, self.model.get(file, (0, 0))[1] + taken)

    @rule(file=users, size=st.integers(0, 10))
    def shrink(self, file: MediaFile, size: int) -> None:
        if file.size >= size:
            file.shrink(size)
            self._sized(file, size)

    @rule()
    def close(self) -> None:
        self.store.close()
        self.model.clear()
        self.closed = True

    def _sized(self, file: MediaFile, size: int) -> None:
        if file in self.model:
            self.model[file] = (self.model[file][0], size)

    @property
    def total(self) -> int:
        return sum(size for _, size in self.model.values())

    @invariant()
    def agrees(self) -> None:
        assert (self.store.bytes, self.store.files) == (self.total, len(self.model))
        if self.closed:
            assert not self.store.directory.exists()
        else:
            assert {path.name for path in self.store.directory.iterdir()} == {file.name for file in self.model}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.parent)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_large_files_are_removed_beside_the_caller(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / f"{PREFIX}x", 4 * LARGE)
    files = [store.create() for _ in range(3)]
    for file in files:
        file.take(LARGE + 1)
        file.drop()
    assert (store.bytes, store.files) == (0, 0)
    store.close()
    assert not list(tmp_path.iterdir())


def test_the_folder_is_private(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / f"{PREFIX}x", MOST)
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    with pytest.raises(PegboardError, match="no folder for media"):
        MediaStore(store.directory, MOST)
    store.close()
    store.close()
    assert not list(tmp_path.iterdir())


def test_never_in_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert not str(new_directory()).startswith("/dev/shm")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert new_directory().parent == tmp_path
    assert new_directory() != new_directory()
    assert not list(tmp_path.iterdir())


OWNER = """
import sys, time
from pathlib import Path
from pegboard.plugins.media.frontend.store import MediaStore
store = MediaStore(Path(sys.argv[1]), 100)
store.create()
print("ready", flush=True)
time.sleep(1000)
"""


def test_folders_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    alive, dead = tmp_path / f"{PREFIX}alive", tmp_path / f"{PREFIX}dead"
    owners = [
        subprocess.Popen([sys.executable, "-c", OWNER, str(path)], stdout=subprocess.PIPE) for path in (alive, dead)
    ]
    for owner in owners:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
    owners[1].send_signal(signal.SIGKILL)
    owners[1].wait()
    fresh, other, link = tmp_path / f"{PREFIX}fresh", tmp_path / "other", tmp_path / f"{PREFIX}link"
    fresh.mkdir()
    other.mkdir()
    link.symlink_to(other)
    store = MediaStore(tmp_path / f"{PREFIX}mine", MOST)
    assert not dead.exists()
    assert alive.exists()
    assert not fresh.exists(), "what is being made has another name until it is locked"
    assert other.exists()
    remove_directory(alive, patience=0.1)
    assert alive.exists(), "its owner lives"
    assert {path.name for path in tmp_path.iterdir()} == {alive.name, store.directory.name, other.name, link.name}
    store.close()
    owners[0].kill()
    for owner in owners:
        owner.communicate()


def test_a_folder_is_removed_by_its_name(tmp_path: Path) -> None:
    folder, other = tmp_path / f"{PREFIX}x", tmp_path / "x"
    for one in (folder, other):
        one.mkdir()
        (one / "file").touch()
    remove_directory(folder)
    remove_directory(other)
    remove_directory(Path())
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / f"{PREFIX}x", MOST)
    shutil.rmtree(store.directory)
    with pytest.raises(InvalidRequest) as caught:
        store.create()
    assert (caught.value.status, caught.value.code) == (503, "media_store_full")
    assert str(tmp_path) not in caught.value.message
    assert store.files == 0
    store.close()
    assert not list(tmp_path.iterdir())
