"""The kernels compile for an H200, without one: what the interpreter lets pass, the compiler may not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "compile_for_h200.py"
SHARED_MEMORY = 227 * 1024


SHAPES = ("bf16-128-4", "bf16-64-3", "fp32-64-3", "bf16-256-2")
"""Dtype, head dim, query heads per KV head."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """All shapes that this run asks for in one process, which is slow to start."""
    asked = [shape for shape in SHAPES if any(item.name == f"test_compiles[{shape}]" for item in request.session.items)]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), *asked]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("shape", [SHAPES[0], *(pytest.param(shape, marks=pytest.mark.full) for shape in SHAPES[1:])])
def test_compiles(shape: str, run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0, run.stderr
    found = [one for line in run.stdout.splitlines() if (one := json.loads(line))["shape"] == shape]
    extend, decode = ["extend_kernel"] * 2, ["decode_kernel"] * 2  # without tails and with; in parts and whole
    assert [one["kernel"] for one in found] == [*extend, *decode, "reduce_kernel"]
    for one in found:
        assert one["shared"] <= SHARED_MEMORY
        assert one["spilled"] == 0, f"{one} spills registers: its blocks are too large"
    if not shape.startswith("fp32"):
        assert min(found[0]["wgmma"], found[1]["wgmma"]) > 0, "extend does not run on the tensor cores as it should"
