"""Runs the numeric tests once more, as other machines would add: ``python -m tests.numeric``.

ATen has vectors of 512 bits, of 256 (`avx2`) and none (`default`), as ATEN_CPU_CAPABILITY says. The native runner and
sampler take their best set, or the one that NATIVE_INSTRUCTIONS names (tests/plugins/cpu_native/conftest.py). Each adds
in another order, and `worst_order` in the worst. Arguments are pytest's. `make test-full` runs this, and docs/style.md
says how to choose a tolerance.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pegboard.plugins.cpu_native.library import NativeError, available, compiler, cpu_flags

TESTS = Path(__file__).parent
NATIVE: tuple[str, ...] = ("plugins/cpu_native", "plugins/lora_native")
SUMS: tuple[str, ...] = (
    "toolkit/model",
    "toolkit/speculation",
    "conformance/test_builtins_that_compute.py",
    "plugins/attn_torch",
    "plugins/mm_qwen_vl/test_encoder*.py",
    "plugins/model_dense",
    "plugins/model_transformers",
    "plugins/pooler_*",
    "plugins/runner_layered",
    "plugins/sampler_torch",
)
"""What adds in torch, below tests/."""
FOLDERS: tuple[str, ...] = (
    *SUMS,
    *NATIVE,
    "toolkit/kernels",
    "toolkit/sampling",
    "plugins/attn_flashinfer",
    "plugins/memory_paged",
    "plugins/mm_qwen_vl/test_pictures.py",
)
"""What computes, but for kernels in Triton: NumPy interprets those, and chooses its instruction set itself."""
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


@dataclass(frozen=True)
class Run:
    """Paths below tests/, with a variable of the environment or arguments of pytest."""

    name: str
    paths: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    def succeeds(self, arguments: Sequence[str]) -> bool:
        paths = [str(path) for pattern in self.paths for path in sorted(TESTS.glob(pattern))]
        command = [sys.executable, "-m", "pytest", "-q", "-m", QUICK, *self.arguments, *arguments, *paths]
        return subprocess.run(command, env={**os.environ, **self.variables}, check=False).returncode == 0


def runs(aten: str, native: Sequence[str]) -> list[Run]:
    """Return what is to run where ATen takes the instruction set `aten`, and native code the first of `native`.

    The variables go together, two by two, because each has tests of its own, and because runs take time to start.
    """
    names = "ATEN_CPU_CAPABILITY", "NATIVE_INSTRUCTIONS"
    together = [Run("sums in the worst order", SUMS, arguments=("-p", "tests.worst_order"))]
    for values in itertools.zip_longest(BELOW.get(aten, ()), native[1:]):
        variables = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        paths = FOLDERS if names[0] in variables else NATIVE
        together.append(Run(" ".join(f"{name}={value}" for name, value in variables.items()), paths, variables))
    return together


def main(arguments: Sequence[str]) -> int:
    """Run all, whatever fails. Return 1 where something did."""
    from torch.backends.cpu import get_cpu_capability

    failed = []
    for run in runs(get_cpu_capability(), native_sets()):
        sys.stdout.write(f"The numeric tests with {run.name}\n")
        sys.stdout.flush()
        if not run.succeeds(arguments):
            failed.append(run.name)
    if failed:
        sys.stdout.write(f"Numeric tests failed with {', '.join(failed)}\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
