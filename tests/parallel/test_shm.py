"""Shared memory among processes: one that is killed is noticed, and nothing of the memory is left."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
from pathlib import Path

import pytest
import torch

from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.parallel.api import CommunicatorContext
from pegboard.plugins.parallel.shm import Shm

SECONDS = 60.0


def made(index: int, size: int = 2) -> Shm:
    return Shm(NoOptions(), CommunicatorContext(size, index, torch.device("cpu")))


def other(meeting: str) -> None:
    """Give a sum, and wait for one that never comes."""
    one = made(1)
    one.connect(Path(meeting), SECONDS)
    one.all_reduce(torch.ones(3))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_noticed(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=other, args=(str(tmp_path),))
    process.start()
    one = made(0)
    one.connect(tmp_path, SECONDS)
    assert one.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        one.all_reduce(torch.ones(3))
    one.close()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    still_open = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    assert not [name for name in still_open if "pegboard-ranks" in name]


def test_memory_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "region").write_text("/proc/self/fd/1234567")
    with pytest.raises(PegboardError, match="rank 1 cannot open the memory of rank 0"):
        made(1).connect(tmp_path, SECONDS)


def test_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Shm.supports(NoOptions(), CommunicatorContext(2, 0, torch.device("cpu"))) is None
    refused = Shm.supports(NoOptions(), CommunicatorContext(2, 0, torch.device("cuda")))
    assert refused == "it is for CPUs, and the model is on cuda"
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    refused = Shm.supports(NoOptions(), CommunicatorContext(2, 0, torch.device("cpu")))
    assert refused is not None
    assert "it needs an x86-64 CPU and Linux, and this is aarch64" in refused


def test_calls_need_the_others() -> None:
    one = made(0)
    for call in (one.all_reduce, one.gather, one.broadcast):
        with pytest.raises(RuntimeError, match="rank 0 of 2 is not connected to the others"):
            call(torch.ones(2, 2))
    one.close()
