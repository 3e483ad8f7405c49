"""The file of an upload: whose it is, who may read it, and when it goes."""

from __future__ import annotations

import asyncio
import errno
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.weight_updates.uploads import Uploads
from pegboard.toolkit.system.scratch import new_directory, remove_dead


async def body(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / new_directory().name


def test_no_other_server_takes_it_for_a_dead_ones(directory: Path) -> None:
    """What another server does at its start (`remove_dead`) leaves the file alone; `close` removes it."""
    uploads = Uploads(directory)
    assert not directory.exists(), "it is made at the first upload"
    with uploads.turn() as file:
        asyncio.run(uploads.keep(body(b"some", b"thing"), file))
        remove_dead(directory.parent)
        assert file.read_bytes() == b"something"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not file.exists()
    with uploads.turn() as file:
        asyncio.run(uploads.keep(body(b"again"), file))
    uploads.close()
    uploads.close()
    assert not directory.exists()


def test_one_at_a_time(directory: Path) -> None:
    uploads = Uploads(directory)
    with uploads.turn(), pytest.raises(InvalidRequest, match="another upload") as refused, uploads.turn():
        pass
    assert (refused.value.status, refused.value.code) == (409, "update_under_way")
    with uploads.turn():
        pass


def test_a_full_disk(directory: Path) -> None:
    """The answer names the folder, and the file is gone."""

    async def full() -> AsyncIterator[bytes]:
        yield b"begun"
        raise OSError(errno.ENOSPC, "No space left on device")

    uploads = Uploads(directory)
    with (
        pytest.raises(InvalidRequest, match=rf"do not fit into {directory} \(No space left") as refused,
        uploads.turn() as file,
    ):
        asyncio.run(uploads.keep(full(), file))
    assert refused.value.status == 507
    assert not any(directory.iterdir())
    uploads.close()
