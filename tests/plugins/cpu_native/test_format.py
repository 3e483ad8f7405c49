"""C++ is formatted as .clang-format says, where clang-format is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pegboard.plugins.cpu_native.library import SOURCE

ROOT = Path(__file__).parents[3]
MAJOR = 19
"""Other versions break lines in other places."""


def test_cpp_is_formatted() -> None:
    command = shutil.which("clang-format", path=str(Path(sys.executable).parent)) or shutil.which("clang-format")
    if command is None:
        pytest.skip("clang-format is not installed")
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    if re.search(rf"version {MAJOR}\.", version) is None:
        pytest.skip(f"{version.strip()}: .clang-format is for version {MAJOR}")
    files = sorted([*SOURCE.parent.glob("*.[ch]*"), *ROOT.glob("benchmarks/*.cpp")])
    assert SOURCE in files
    style = f"--style=file:{ROOT / '.clang-format'}"
    done = subprocess.run(
        [command, style, "--dry-run", "--Werror", *files], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:2000]
