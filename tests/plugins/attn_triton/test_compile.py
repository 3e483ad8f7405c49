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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "dim", "group"), [("bf16", 128, 4), ("bf16", 64, 3), ("fp32", 64, 3), ("bf16", 256, 2)]
)
def test_compiles(dtype: str, dim: int, group: int, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(SCRIPT), dtype, str(dim), str(group)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [one["kernel"] for one in found] == ["extend_kernel", "decode_kernel", "decode_kernel", "reduce_kernel"]
    for one in found:
        assert one["shared"] <= SHARED_MEMORY
        assert one["spilled"] == 0, f"{one} spills registers: its blocks are too large"
    if dtype != "fp32":
        assert found[0]["wgmma"] > 0, "extend does not run on the tensor cores as it should"
