"""A step that hangs ends its process with tracebacks; a rest may last for ever."""

from __future__ import annotations

import subprocess
import sys

BEGIN = """
import time
from pegboard.toolkit.system.watchdog import Watchdog

watchdog = Watchdog(1.0)
watchdog.step_begins()
"""


def run(rest: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BEGIN + rest], capture_output=True, text=True, timeout=60, check=False)


def test_a_step_that_hangs() -> None:
    ended = run("def hang():\n    time.sleep(60)\nhang()\n")
    assert ended.returncode == 1
    assert "in hang" in ended.stderr


def test_a_rest_is_not_a_step() -> None:
    assert run("watchdog.rest()\ntime.sleep(2)\n").returncode == 0
