"""What the Makefile says and decides itself, played with commands that only write down how they were called."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Played:
    """Commands of a `bin` folder that write their arguments to `calls`, and end with the status that `script` says."""

    def __init__(self, folder: Path) -> None:
        self.venv = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.log = folder / "calls"

    def command(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" | tee -a {self.log}\n{script}\n')
        path.chmod(0o755)

    def make(self, *arguments: str, output: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
        command = ["make", "--no-print-directory", f"VENV={self.venv}", *arguments]
        # The make that runs these tests hands its flags down.
        env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        return subprocess.run(
            command, cwd=ROOT, env=env, stdout=output, stderr=output, text=True, timeout=60, check=False
        )

    def installed(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Make something as if `make setup` had been run."""
        return self.make(f"--old-file={self.venv}/.installed", *arguments)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def played(tmp_path: Path) -> Played:
    return Played(tmp_path)


@pytest.mark.parametrize(
    ("with_workers", "without", "calls"),
    [(0, 1, 1), (1, 0, 1), (2, 0, 2), (2, 1, 2), (2, 2, 2)],
    ids=["right", "wrong", "workers came late", "late and wrong", "not readable"],
)
def test_types_are_checked_without_workers_where_they_fail(
    played: Played, with_workers: int, without: int, calls: int
) -> None:
    """mypy ends with status 2 where its workers start too late, and with 1 for wrong types, which stay an error."""
    played.command("mypy", f'test "$1" = --num-workers && exit {with_workers}; exit {without}')
    done = played.installed("typecheck")
    assert played.calls == ["mypy --num-workers 2", "mypy "][:calls]
    assert (done.returncode == 0) == ((without if calls == 2 else with_workers) == 0)


def test_setup_says_each_step(played: Played) -> None:
    """Before it begins; and only on a terminal pip shows what it does."""
    played.command("python", "")
    lines = played.make("setup", "PYTHON=python3").stdout.splitlines()
    steps = [line for line in lines if re.match(r"\d of 5: ", line)]
    assert [step[0] for step in steps] == list("12345")
    assert [lines.index(step) for step in steps] == [1, 2, 4, 6, 8]
    assert sum(" -qq install " in line for line in played.calls) == 3
    (played.venv / ".installed").unlink()
    played.log.unlink()
    ours, its = os.openpty()
    played.make("setup", "PYTHON=python3", output=its)
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # what a terminal's end says
        while part := os.read(ours, 2**16):
            shown += part
    os.close(ours)
    assert shown.count(b" of 5: ") == 5
    assert sum(" install " in line and "-qq" not in line for line in played.calls) == 3


@pytest.mark.parametrize(("target", "limit"), [("test", 5), ("test-full", 20)])
@pytest.mark.parametrize("status", [0, 1])
def test_tests_say_how_long_they_took(played: Played, target: str, limit: int, status: int) -> None:
    played.command("python", f"exit {status}")
    done = played.installed(target)
    assert re.fullmatch(
        rf"make {target}: \d+ min \d+ s, limit {limit} min on two idle cores", done.stdout.splitlines()[-1]
    )
    assert (done.returncode != 0) == (status != 0)


@pytest.mark.parametrize(("matrices", "numeric"), [(0, 0), (1, 0), (0, 1)])
def test_numeric_tests_follow_the_matrices(played: Played, matrices: int, numeric: int) -> None:
    """Whatever came of those."""
    played.command("python", f'test "$2" = pytest && exit {matrices}; exit {numeric}')
    done = played.installed("test-full")
    assert [call.split()[2] for call in played.calls] == ["pytest", "tests.numeric"]
    assert (done.returncode != 0) == bool(matrices or numeric)


def test_every_test_for_a_gpu_is_in_its_list() -> None:
    """`make gpu-test` lists paths, so that it needs no packages of other tests: they exist, and none is missing."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    listed = re.search(r"^GPU_TESTS := (.*)$", text, re.MULTILINE)
    assert listed is not None
    paths = [ROOT / path for path in listed[1].split()]
    assert [path for path in paths if not path.exists()] == []
    mark = re.compile(r"^(pytestmark = |@)pytest\.mark\.gpu|marks=pytest\.mark\.gpu", re.MULTILINE)
    marked = [file for file in (ROOT / "tests").rglob("*.py") if mark.search(file.read_text())]
    assert len(marked) > 4
    assert [file for file in marked if not any(file.is_relative_to(path) for path in paths)] == []
