"""A command that is bound to its parent ends with it, though it is stopped and cannot see anything."""

from __future__ import annotations

import subprocess
import sys

import psutil

from pegboard.toolkit.system.bound_command import bound_command

SECONDS = 30.0
WAITING = ("timeit", "-n", "1", "import time; time.sleep(60)")
PARENT = f"""
import subprocess, time
from pegboard.toolkit.system.bound_command import bound_command
print(subprocess.Popen(bound_command(*{WAITING})).pid, flush=True)
time.sleep(60)
"""


def test_it_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as said:
        child = psutil.Process(int(said.readline()))
    while child.cmdline()[1:3] != ["-m", WAITING[0]]:
        assert child.is_running()
    child.suspend()
    parent.kill()
    parent.wait(SECONDS)
    psutil.wait_procs([child], SECONDS)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_arguments_are_passed_on() -> None:
    done = subprocess.run(
        bound_command("timeit", "-n", "1", "print('a b')"), capture_output=True, text=True, check=True
    )
    assert "a b" in done.stdout


def test_one_whose_parent_is_another_does_not_begin() -> None:
    command = bound_command("timeit", "-n", "1", "print('a b')")
    command[3] = "1"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
