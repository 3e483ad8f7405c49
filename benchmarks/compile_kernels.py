"""All kernels compiled with Triton and ptxas, without a GPU: registers, spills, shared memory, occupancy, tensor cores.

    python -m benchmarks.compile_kernels [--target sm_90 sm_80] [--only PATTERN] [--jobs 2] [--markdown FILE]

Fails where a kernel does not compile, spills registers, needs more shared memory than a block may have (227 KiB on
sm_90, 163 KiB on sm_80, 99 KiB on sm_86), or does not run on the tensor cores though its case says so. Cases are in
`benchmarks/kernels`, whose docstring says how to add some. Occupancy is the share of a multiprocessor's warps that fit
on it, by registers and shared memory; kernels that wait for memory want much of it, and those on tensor cores can do
with little.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import multiprocessing
import os
import pkgutil
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks import kernels as kernel_cases
from benchmarks.kernel_tables import page
from benchmarks.kernels import Case, Target
from pegboard.toolkit import kernels
from pegboard.toolkit.kernels.launch import Launch, observed

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction

TYPES = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")
"""Constants of a launch that are no parameters of the kernel."""


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What a multiprocessor has: KiB of shared memory, of which a block gets one less at most, warps and blocks."""

    shared: int
    warps: int
    blocks: int


ARCHITECTURES = {
    (8, 0): Multiprocessor(164, 64, 32),
    (8, 6): Multiprocessor(100, 48, 16),
    (8, 7): Multiprocessor(164, 48, 16),
    (8, 9): Multiprocessor(100, 48, 24),
    (9, 0): Multiprocessor(228, 64, 32),
    (10, 0): Multiprocessor(228, 64, 32),
    (10, 3): Multiprocessor(228, 64, 32),
    (12, 0): Multiprocessor(100, 48, 24),
    (12, 1): Multiprocessor(100, 48, 24),
}
"""By compute capability, as the CUDA programming guide has them. All of them have 65,536 registers."""

TENSOR_MEMORY = 512
"""Columns of tensor memory that a block may have on 10.0 and 10.3."""

TENSOR_CORES = {(9, 0): "wgmma", (10, 0): "tcgen05.mma", (10, 3): "tcgen05.mma"}
"""What multiplies large tiles; all others have mma.sync."""

WARP_GROUP = 64
"""Rows that its products take at least."""


@dataclass(frozen=True, slots=True)
class Build:
    """What is compiled: a kernel and all that its code depends on. `key` is the same for launches of the same code."""

    case: str
    target: Target
    kernel: JITFunction
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    aligned: frozenset[int]
    options: Mapping[str, object]
    tensor_cores: bool

    @property
    def key(self) -> str:
        parts = self.target, self.kernel.__name__, self.signature, self.constants, sorted(self.aligned), self.options
        return repr(parts)


@dataclass(frozen=True, slots=True)
class Built:
    """What became of it. `problem` is empty where all is well."""

    case: str
    kernel: str
    target: Target
    warps: int
    registers: int
    spilled: int
    shared: int
    occupancy: float
    products: str
    problem: str


def build_of(case: Case, target: Target, launch: Launch) -> Build:
    """Return what Triton would compile for a launch: ints that are 1 are constants, and those, and addresses, that 16
    divides are known to be.
    """
    kernel: JITFunction = launch.kernel
    signature, constants, aligned = {}, {}, set()
    values = dict(zip(kernel.arg_names, launch.arguments, strict=False))
    options = {name: value for name, value in launch.constants.items() if name in OPTIONS}
    values |= {name: value for name, value in launch.constants.items() if name not in OPTIONS}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            if value.storage_offset() * value.itemsize % 16 == 0:
                aligned.add(place)
        elif isinstance(value, bool):
            signature[parameter.name] = "i1"
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                aligned.add(place)
        else:
            signature[parameter.name] = "fp32"
    wanted = kernel.__name__ in case.tensor_cores
    return Build(case.name, target, kernel, signature, constants, frozenset(aligned), options, wanted)


def modules() -> Iterator[Sequence[Case]]:
    """Yield the cases of each module in benchmarks/kernels."""
    for found in pkgutil.iter_modules(kernel_cases.__path__):
        yield importlib.import_module(f"benchmarks.kernels.{found.name}").CASES


def launched_by(case: Case, target: Target) -> list[Launch]:
    """Return what a case launches. Nothing runs."""
    launches: list[Launch] = []

    def note(launch: Launch) -> bool:
        launches.append(launch)
        return False

    with kernels.allowed("meta"), observed(note):
        case.run(target)
    return launches


@cache
def builds(targets: tuple[Target, ...], only: str) -> tuple[Build, ...]:
    """Return all that is to be compiled, in the order of cases, each once."""
    found: dict[str, Build] = {}
    for target in targets:
        for case in (one for cases in modules() for one in cases if re.search(only, one.name)):
            launches = launched_by(case, target)
            if not launches:
                raise SystemExit(f"the case {case.name!r} launches nothing")
            for launch in launches:
                build = build_of(case, target, launch)
                found.setdefault(build.key, build)
    return tuple(found.values())


def occupancy(target: Target, warps: int, registers: int, shared: int) -> float:
    """Share of the warps that are resident: registers come by 256 a warp, shared memory with 1 KiB a block."""
    has = ARCHITECTURES[target.capability]
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps)
    by_shared = has.shared * 1024 // (shared + 1024)
    return min(by_registers, by_shared, has.warps // warps, has.blocks) * warps / has.warps


def products_of(ptx: str) -> str:
    """Return which instructions multiply matrices, if any does: the least of them where there are several."""
    return next(
        (name for name in ("mma.sync", "wgmma", "tcgen05.mma") if re.search(rf"^\s*(@%\w+ )?{name}", ptx, re.M)), ""
    )


def compiled(build: Build) -> Built:
    """Compile one kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = build.kernel.arg_names
    constants = {(names.index(name),): value for name, value in build.constants.items()}
    attributes = {(place,): [["tt.divisibility", 16]] for place in build.aligned}
    source = ASTSource(build.kernel, dict(build.signature), constants, attributes)
    major, minor = build.target.capability
    said = io.StringIO()
    triton.knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(said):
        made = triton.compile(source, target=GPUTarget("cuda", major * 10 + minor, 32), options=dict(build.options))
    log = said.getvalue()
    registers = max(int(one) for one in re.findall(r"Used (\d+) registers", log))
    spilled = sum(int(one) for one in re.findall(r"(\d+) bytes spill stores", log))
    products = products_of(made.asm["ptx"])
    shared, warps = made.metadata.shared, made.metadata.num_warps
    share = occupancy(build.target, warps, registers, shared)
    columns = getattr(made.metadata, "tmem_size", 0) or 0
    problem = problem_of(build, spilled, shared, products, columns)
    return Built(
        build.case, build.kernel.__name__, build.target, warps, registers, spilled, shared, share, products, problem
    )


def wanted_of(build: Build) -> str:
    """Return what a kernel that is to use tensor cores multiplies with: tiles of fewer than 64 rows as on sm_80."""
    rows = build.constants.get("BLOCK_M", build.constants.get("BLOCK_H", WARP_GROUP))
    newest = isinstance(rows, int) and rows >= WARP_GROUP
    return TENSOR_CORES.get(build.target.capability, "mma.sync") if newest else "mma.sync"


def problem_of(build: Build, spilled: int, shared: int, products: str, columns: int = 0) -> str:
    """Return what is wrong, or nothing. `columns` of tensor memory are taken."""
    most = ARCHITECTURES[build.target.capability].shared - 1
    if spilled:
        return f"spills {spilled} bytes of registers"
    if shared > most * 1024:
        return f"needs {shared} bytes of shared memory, and may have {most} KiB"
    if columns > TENSOR_MEMORY:
        return f"needs {columns} columns of tensor memory, and may have {TENSOR_MEMORY}"
    if build.tensor_cores and products != wanted_of(build):
        return (
            f"does not run on the tensor cores by {wanted_of(build)}, but by {products or 'no instruction of theirs'}"
        )
    return ""


def compile_at(targets: tuple[Target, ...], only: str, place: int) -> Built:
    """Compile one of `builds`, in a process of its own; one that does not compile has a problem."""
    build = builds(targets, only)[place]
    try:
        return compiled(build)
    except Exception as error:  # whatever Triton and ptxas raise: the others are compiled all the same
        return Built(build.case, build.kernel.__name__, build.target, 0, 0, 0, 0, 0.0, "", f"does not compile: {error}")


def compile_all(targets: tuple[Target, ...], only: str, jobs: int) -> Iterator[Built]:
    """Compile in `jobs` processes, with a cache that is thrown away: what was compiled before says no registers."""
    os.environ["TRITON_INTERPRET"] = "0"  # before triton is imported, here and there
    count = len(builds(targets, only))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            yield from pool.map(compile_at, [targets] * count, [only] * count, range(count))


def sm(target: Target) -> str:
    return f"sm_{target.capability[0]}{target.capability[1]}"


HEAD = (
    "| target | case | kernel | warps | registers | spilled | shared KiB | occupancy | products |",
    "|---|---|---|---:|---:|---:|---:|---:|---|",
)


def row(one: Built) -> str:
    """Return a row of Markdown, the same for a terminal."""
    return (
        f"| {sm(one.target)} | {one.case} | {one.kernel} | {one.warps} | {one.registers} | {one.spilled} "
        f"| {one.shared / 1024:.1f} | {one.occupancy:.0%} | {one.products} |"
    )


def target_of(name: str) -> Target:
    found = {f"sm_{major}{minor}": Target((major, minor)) for major, minor in ARCHITECTURES}
    if name not in found:
        raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(found)}")
    return found[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", type=target_of, default=[target_of("sm_90"), target_of("sm_80")])
    parser.add_argument("--only", default="", help="cases whose name matches this regular expression")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--markdown", type=Path, help="write the page of docs/ with a table of each kernel")
    args = parser.parse_args()
    began, found = time.perf_counter(), []
    print(*HEAD, sep="\n")
    for one in compile_all(tuple(args.target), args.only, args.jobs):
        found.append(one)
        print(row(one), flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    print(f"\n{len(found)} kernels in {time.perf_counter() - began:.0f} s, {seconds:.0f} s of a processor")
    if args.markdown is not None:
        command = " ".join(("python -m benchmarks.compile_kernels", *sys.argv[1:]))
        args.markdown.write_text(page(found, command, version("triton")))
    wrong = [f"{sm(one.target)} {one.case}, {one.kernel}: {one.problem}" for one in found if one.problem]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
