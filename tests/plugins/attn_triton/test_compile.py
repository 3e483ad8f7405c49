"""The kernels compile for an H200, without one: what the interpreter lets pass, the compiler may not.

All shapes, for all GPUs: `python -m benchmarks.compile_kernels`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHAPES = ("128 bf16", "128 bf16 e4m3")


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_compiles(shape: str) -> None:
    """Without spills, within shared memory, and extends on tensor cores."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.compile_kernels",
        "--target",
        "sm_90",
        "--only",
        f"^attention {shape}$",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(
        [*command, "--only", f"^attention {shape}$"], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    compiled = [line.split("|")[3].strip() for line in run.stdout.splitlines() if "| sm_90 |" in line]
    # Whole and in parts; without tails and with; beside a shared prefix, where a decode is compiled for the offset.
    assert compiled[:3] == ["decode_kernel", "decode_kernel", "reduce_kernel"]
    assert compiled[3:6:2] == ["tiles_kernel"] * 2
    assert compiled[4:7:2] == ["extend_kernel"] * 2
    assert "prefix_kernel" in compiled
