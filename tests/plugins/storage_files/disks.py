"""Storages below a folder, and small disks to fill."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from pegboard.plugins.kv_tiers.api import KVStorageContext
from pegboard.plugins.storage_files.options import FilesOptions
from pegboard.plugins.storage_files.storage import FilesStorage

FAR = float("inf")
IDENTITY = "ab" * 32
BLOCK = 4000
ON_DISK = 4096
"""What a file of such a block takes: its header has 88 bytes."""


def key(number: int) -> bytes:
    return np.random.default_rng(number).bytes(32)


def block(number: int) -> bytes:
    return np.random.default_rng(1 << 20 | number).bytes(BLOCK)


class Disk:
    """A storage of blocks by their numbers."""

    def __init__(self, folder: Path, identity: str = IDENTITY, **options: object) -> None:
        self.folder = folder
        settings = FilesOptions.model_validate({"dir": str(folder), "min_free": 0.0, **options})
        self.storage = FilesStorage(settings, KVStorageContext(identity, BLOCK))
        self.await_scans(1)

    def await_scans(self, count: int) -> None:
        """Wait until the folder has been searched so many times since the start."""
        until = time.monotonic() + 30
        while self.stat("scans") < count:
            assert time.monotonic() < until, "the folder is not searched"
            time.sleep(0.002)

    def stat(self, name: str) -> float:
        return self.storage.stats()[name]

    def put(self, *numbers: int) -> int:
        return self.storage.set([key(one) for one in numbers], [memoryview(block(one)) for one in numbers], FAR)

    def read(self, number: int) -> bool:
        """Read a block, and compare it."""
        out = bytearray(BLOCK)
        found = self.storage.get([key(number)], [memoryview(out)], FAR) == 1
        assert not found or out == block(number)
        return found

    def which(self, numbers: Sequence[int]) -> list[int]:
        """Return those that are there, and leave their times as they are."""
        return [one for one in numbers if self.storage.exists([key(one)], FAR)]

    def path(self, number: int) -> Path:
        name = key(number).hex()
        return self.folder / self.storage.ctx.identity / name[:2] / name[2:4] / name

    def files(self) -> list[Path]:
        """Return all files of blocks, temporary ones among them."""
        return sorted(path for path in self.folder.glob("*/*/*/*") if not path.is_dir())

    def close(self) -> None:
        self.storage.close()


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """Mount a file system in memory. Skips the test where that is not allowed."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        done = subprocess.run(words, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
