"""Launchers keep their contract; torchrun's with a process that waits for ranks, as torchrun starts one."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.parallel import torchrun
from pegboard.plugins.parallel.api import LaunchContext, RankLauncher
from pegboard.plugins.parallel.suite.launcher import RankLauncherContract
from tests.parallel.actors_here import ActorsHere

PATIENCE = 60.0


class TestActors(RankLauncherContract):
    """Those of the launcher `ray`, in this process; tests/plugins/launch_ray has them in Ray's."""

    factory = ActorsHere
    provides = frozenset({"machines"})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Variables as torchrun sets them for rank 0 of 2, and the directory that the server's process makes."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    found = torchrun.meeting_place()
    assert found is not None
    found.mkdir(mode=0o700)
    yield found
    shutil.rmtree(found)


ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": f"test-{os.getpid()}", "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": "1",
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip


@contextlib.contextmanager
def attending(place: Path, count: int, ends: Sequence[int] = ()) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Other ranks of torchrun's, for as long as a server is there."""
    command = [sys.executable, "-m", "pegboard.plugins.parallel.torchrun"]
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(place / "server"))
        alive.listen(count)
        environments = [{**os.environ, "RANK": str(rank)} for rank in range(1, count + 1)]
        started = [subprocess.Popen(command, env=environment) for environment in environments]
        try:
            yield started
            alive.close()
            assert [process.wait(PATIENCE) for process in started] == list(ends or [0] * count), (
                "they end with the server"
            )
        finally:
            for process in started:
                process.kill()
                process.wait()


class TestTorchrun(RankLauncherContract):
    provider = "torchrun"

    @pytest.fixture(autouse=True)
    def _place(self, place: Path) -> None:
        self.place = place

    @contextlib.contextmanager
    def launcher(self, size: int = 2) -> Iterator[RankLauncher]:
        with attending(self.place, size - 1), super().launcher(size) as launcher:
            yield launcher

    def test_a_rank_ends_with_its_launcher(self) -> None:
        """The scheduler's process was killed: nothing runs on for it."""
        with attending(self.place, 1), super().launcher() as launcher, self.rank(launcher) as (handle, ours):
            ours.recv(100)
            assert isinstance(handle, torchrun.Attended)
            handle.link.socket.shutdown(socket.SHUT_RDWR)
            assert ours.recv(100) == b""

    def test_a_process_of_torchruns_that_is_killed(self) -> None:
        with (
            attending(self.place, 1, [-9]) as (process,),
            super().launcher() as launcher,
            self.rank(launcher) as (handle, ours),
        ):
            ours.recv(100)
            process.kill()
            assert handle.died(PATIENCE) == "ended with the process of torchrun's that ran it"
            assert ours.recv(100) == b""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "1"}, "torchrun has started processes on several machines"),
        (
            {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"},
            "torchrun has started 3 processes, and parallel.tensor times parallel.pipeline is 2",
        ),
        ({"MASTER_PORT": "2"}, "this server was not started by torchrun"),
    ],
)
def test_when_it_is_chosen(
    place: Path, changed: dict[str, str], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    found = torchrun.Torchrun.supports(NoOptions(), LaunchContext(2, 2, "x"))
    assert found == said if said is None else found is not None and said in found


def test_a_directory_that_others_can_use_is_refused(place: Path) -> None:
    place.chmod(0o755)
    with pytest.raises(PegboardError, match="is not a directory that only this user can use"):
        torchrun.Torchrun(NoOptions(), LaunchContext(2, 2, "x"))


def test_a_server_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "COME_SECONDS", 0.2)
    with pytest.raises(PegboardError, match=r"rank 0 of torchrun's has not come within 0.2 s"):
        torchrun.attend(tmp_path)


def test_no_process_that_waits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "COME_SECONDS", 0.2)
    launcher = torchrun.Torchrun(NoOptions(), LaunchContext(2, 2, "x"))
    with pytest.raises(PegboardError, match=r"no process of torchrun's has come within 0.2 s"):
        launcher.start(lambda file: b"")
    launcher.close()
