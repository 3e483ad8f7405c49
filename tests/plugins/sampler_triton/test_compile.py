"""The kernel compiles, without a GPU: what the interpreter lets pass, the compiler may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.full
def test_it_compiles_without_spills() -> None:
    command = [sys.executable, "-m", "benchmarks.compile_kernels", "--only", "^sampler", "--jobs", "1"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 kernels" in done.stdout
