"""Runs the numeric tests once more with each other instruction set that this machine has: ``python -m tests.numeric``.

ATen has vectors of 512 bits, of 256 (`avx2`) and none (`default`), as ATEN_CPU_CAPABILITY says. The native runner and
sampler take their best set, or the one that NATIVE_INSTRUCTIONS names (tests/plugins/cpu_native/conftest.py). Each sums
in another order. Arguments are pytest's. `make test-full` runs this; docs/style.md says how to choose a tolerance.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pegboard.plugins.cpu_native.library import NativeError, available, compiler, cpu_flags

TESTS = Path(__file__).parent
NATIVE = ("plugins/cpu_native/test_[!l]*.py",)
"""All but test_library.py, which is about looking for instruction sets."""
FOLDERS = (
    *(f"core/toolkit/{name}" for name in ("kernels", "model", "sampling", "speculation")),
    *("plugins/attn_flashinfer", "plugins/attn_torch", "plugins/attn_triton/test_conformance.py"),
    *("plugins/sampler_*", "plugins/logits_basic", "plugins/pooler_*", "plugins/memory_paged"),
    *("plugins/model_dense", "plugins/model_transformers", "plugins/mm_qwen_vl", "plugins/runner_layered"),
    *NATIVE,
)
"""Below tests/: what computes. Kernels in Triton are interpreted by NumPy, which has instruction sets of its own."""
QUICK = "not full and not gpu and not soak and not clients and not transfer_packages"

BELOW = {"AVX512": ("avx2", "default"), "AVX2": ("default",)}
"""What ATEN_CPU_CAPABILITY may choose where ATen itself chooses another."""


def native_sets() -> tuple[str, ...]:
    """Return the instruction sets that the native code can be compiled and run with here, best first."""
    try:
        compiler()
    except NativeError:
        return ()
    names = available(cpu_flags())
    # What is written for AMX is tested everywhere.
    return (*names, "amx_emulated") if names[:1] == ("avx512",) else names


def runs(aten: str, native: Sequence[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield a variable, its value and what to run with it. ATen's own set is `aten`, that of native code the first."""
    yield from (("ATEN_CPU_CAPABILITY", name, FOLDERS) for name in BELOW.get(aten, ()))
    yield from (("NATIVE_INSTRUCTIONS", name, NATIVE) for name in native[1:])


def main(arguments: Sequence[str]) -> int:
    """Run all, whatever fails. Return 1 where something did."""
    from torch.backends.cpu import get_cpu_capability

    failed = []
    for variable, value, folders in runs(get_cpu_capability(), native_sets()):
        paths = [str(path) for folder in folders for path in sorted(TESTS.glob(folder))]
        sys.stdout.write(f"The numeric tests with {variable}={value}\n")
        sys.stdout.flush()
        command = [sys.executable, "-m", "pytest", "-q", "-m", QUICK, *arguments, *paths]
        if subprocess.run(command, env={**os.environ, variable: value}, check=False).returncode:
            failed.append(f"{variable}={value}")
    if failed:
        sys.stdout.write(f"Numeric tests failed with {', '.join(failed)}\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
