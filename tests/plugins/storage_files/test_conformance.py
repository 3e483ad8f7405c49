"""The storage in files keeps the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegboard.plugins.kv_tiers.api import KVStorage
from pegboard.plugins.kv_tiers.suite.kv_storage import KVStorageContract
from pegboard.plugins.storage_files.options import FilesOptions


def path_of(storage: KVStorage, key: bytes) -> Path:
    """Return where a block is."""
    assert isinstance(storage.options, FilesOptions)
    name = key.hex()
    return Path(storage.options.dir) / storage.ctx.identity / name[:2] / name[2:4] / name


class TestFiles(KVStorageContract):
    provider = "files"

    def place(self, folder: Path) -> dict[str, str]:
        return {"dir": str(folder / "kv")}

    def raw(self, storage: KVStorage, key: bytes) -> bytes | None:
        path = path_of(storage, key)
        return path.read_bytes() if path.exists() else None

    def put_raw(self, storage: KVStorage, key: bytes, data: bytes | None) -> None:
        path = path_of(storage, key)
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)


@pytest.mark.full
class TestFilesWithFsync(TestFiles):
    options = {"fsync": True, "max_bytes": 1 << 30, "min_free": 0.0}
