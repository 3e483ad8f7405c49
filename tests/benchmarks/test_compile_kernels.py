"""All kernels compile for sm_90 and sm_80, and what is wrong with one is said."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.compile_kernels import build_of, launched_by, occupancy, problem_of, products_of, target_of
from benchmarks.kernels import Case, Target
from pegboard.toolkit.kernels import operations
from pegboard.toolkit.kernels.launch import Launch

pytest.importorskip("triton")

H200, A100 = Target((9, 0)), Target((8, 0))
ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_all_of_the_toolkit_compile() -> None:
    """In a process of its own: here Triton interprets."""
    command = [sys.executable, "-m", "benchmarks.compile_kernels", "--only", "^(norms|silu|heads|rotations|indices)"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "| sm_80 | heads qwen3-8b e4m3 | qk_norm_rope_store_kernel | 4 |" in done.stdout
    assert "52 kernels" in done.stdout


def launched(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Launch:
    def run(target: Target) -> None:
        weight = target.empty(columns, dtype=dtype)
        operations.rms_norm(target.empty(rows, columns, dtype=dtype), weight, 1e-5)

    from triton.runtime.jit import JITFunction

    (launch,) = launched_by(Case("norm", run), H200)
    # Triton may interpret in this process.
    return replace(launch, kernel=JITFunction(getattr(launch.kernel, "fn")))  # noqa: B009 - kernels are not only Triton's


CASE = Case("norms", lambda target: None, frozenset({"rms_norm_kernel"}))


def test_what_a_launch_compiles_to() -> None:
    build = build_of(CASE, H200, launched(8, 64))
    assert build.signature["x"] == "*bf16"
    assert build.signature["x_outer"] == "i32"
    assert build.signature["eps"] == "fp32"
    assert build.constants == {"INNER": 1, "OFFSET": 0.0, "DIM": 64, "BLOCK": 64}
    assert build.options == {"num_warps": 1, "enable_fp_fusion": True}
    assert build.aligned == {0, 1, 2, 3, 4, 5}
    assert build.key == build_of(CASE, H200, launched(3, 64)).key, "the number of rows is in no code"
    others = launched(8, 66), launched(8, 64, torch.float16), launched(8, 1)
    assert build.key not in {build_of(CASE, H200, one).key for one in others}
    assert build.key != build_of(CASE, A100, launched(8, 64)).key


def test_one_is_a_constant() -> None:
    assert build_of(CASE, H200, launched(8, 1)).constants["x_outer"] == 1


def test_what_is_wrong() -> None:
    build = build_of(CASE, H200, launched(8, 64))
    assert problem_of(build, spilled=0, shared=227 * 1024, products="wgmma") == ""
    assert "spills 8 bytes" in problem_of(build, spilled=8, shared=0, products="wgmma")
    assert "may have 227 KiB" in problem_of(build, spilled=0, shared=227 * 1024 + 1, products="wgmma")
    assert "mma.sync" in problem_of(build, spilled=0, shared=0, products="mma.sync")
    assert "no instruction" in problem_of(build, spilled=0, shared=0, products="")
    older = build_of(CASE, A100, launched(8, 64))
    assert problem_of(older, spilled=0, shared=163 * 1024, products="mma.sync") == ""
    assert "may have 163 KiB" in problem_of(older, spilled=0, shared=164 * 1024, products="mma.sync")
    assert "tensor cores" in problem_of(older, spilled=0, shared=0, products="")
    small = replace(build, constants={"BLOCK_M": 32})
    assert problem_of(small, spilled=0, shared=0, products="mma.sync") == "", "wgmma takes 64 rows"
    newer = build_of(CASE, target_of("sm_100"), launched(8, 64))
    assert problem_of(newer, spilled=0, shared=0, products="tcgen05.mma", columns=512) == ""
    assert "600 columns" in problem_of(newer, spilled=0, shared=0, products="tcgen05.mma", columns=600)


def test_what_multiplies() -> None:
    lines = "\twgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1};\n\t@%p1 tcgen05.mma.cta_group::1 [%r1];\n"
    assert products_of(lines) == "wgmma"
    assert products_of(lines + "\tmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1};\n") == "mma.sync"
    assert products_of(lines[lines.index("\n") :]) == "tcgen05.mma"
    assert products_of("\tfma.rn.f32 %f1, %f2, %f3, %f4; // no wgmma\n") == ""


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "share"),
    [(4, 32, 0, 1.0), (4, 128, 0, 0.25), (8, 33, 0, 0.75), (8, 200, 96 * 1024, 0.125), (16, 128, 0, 0.25)],
)
def test_occupancy(warps: int, registers: int, shared: int, share: float) -> None:
    """As NVIDIA's own table for 9.0 has it."""
    assert occupancy(H200, warps, registers, shared) == share


def test_occupancy_of_smaller_ones() -> None:
    assert occupancy(target_of("sm_86"), 4, 32, 0) == 1.0
    assert occupancy(target_of("sm_86"), 1, 32, 0) == 16 / 48, "of so many blocks"
    assert occupancy(target_of("sm_89"), 4, 32, 49 * 1024) == 8 / 48, "two blocks, since each takes one more"


def test_targets_that_are_not_known() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="sm_75 is not one of sm_80, sm_86"):
        target_of("sm_75")
