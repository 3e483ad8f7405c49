"""Repack FlashInfer's wheel so that it can be carried to a GPU machine without an index.

    python -m benchmarks.gpu.flashinfer_slim flashinfer_python-*.whl DIRECTORY

62 MB become about 25: all Python stays, all headers that can be included, and the CUDA sources of prefill, decode,
pages, cascades, sampling, norms and rotations. Beside it are written empty distributions of what the wheel's metadata
requires and these kernels never import. Exits with 1 if a source that stays includes a header that does not.
"""

from __future__ import annotations

import posixpath
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

LEFT_OUT = re.compile(
    r"flashinfer/(data/csrc/(cake_|kda|fused_moe|gdn|experimental|blackwell|alphamoe|nv_internal|mamba|moe_|msa|sm110|xqa"
    r"|fmha_|dsv|mega|deep|nvfp4|prims|kimi|trt|ulysses)"
    r"|data/cutlass/(examples|python|test|media|docs|unit|tools/(library|profiler|util/scripts))"
    r"|data/cccl/(python|docs|test|libcudacxx/test|cub/test|thrust/test)"
    r"|(experimental|moe_ep)/.*(?<!\.py)$)"
)
UNUSED = {
    "cuda-python": "13.0.0",
    "cuda-tile": "1.4.0",
    "nccl-extensions": "0.1.0",
    "nccl4py": "0.4.1",
    "nvidia-cudnn-frontend": "1.31.0",
    "nvidia-cutlass-dsl": "4.6.2",
}
"""What the metadata requires and nothing here imports, with the versions that the empty distributions claim."""

SOURCES = (".cu", ".cuh", ".h", ".hpp", ".inl", ".jinja")
ROOTS = ("include/", "csrc/", "cutlass/include/", "cutlass/tools/util/include/")
"""Where the compiler looks for headers, below flashinfer/data."""


def repacked(source: Path, target: Path) -> None:
    """Write a wheel without what is left out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for entry in old.infolist():
            if LEFT_OUT.match(entry.filename):
                continue
            data = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                data = b"".join(line for line in data.splitlines(True) if not LEFT_OUT.match(line.decode()))
            new.writestr(entry.filename, data)


def lacking(source: Path, target: Path) -> Iterator[str]:
    """Yield each header that the whole wheel has, the repacked one has not, and a source of the latter includes."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target) as new:
        whole, kept = set(old.namelist()), set(new.namelist())
        for name in sorted(kept):
            if not name.startswith("flashinfer/data/") or not name.endswith(SOURCES):
                continue
            for header in re.findall(r'#\s*include\s*["<]([^">]+)[">]', new.read(name).decode("utf-8", "replace")):
                beside = posixpath.normpath(posixpath.join(posixpath.dirname(name), header))
                found = {beside, *(f"flashinfer/data/{root}{header}" for root in ROOTS)} & whole
                if found and not found & kept:
                    yield f"{name} includes {header}"


def empty_distribution(directory: Path, name: str, version: str) -> None:
    """Write a wheel that has a name and a version, and nothing to import."""
    flat = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(directory / f"{flat}-py3-none-any.whl", "w") as new:
        info = f"{flat}.dist-info"
        new.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        new.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        new.writestr(f"{info}/RECORD", "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Repack a wheel into a directory, under its own name."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 2:
        sys.exit(__doc__)
    source, directory = Path(given[0]), Path(given[1])
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / source.name
    repacked(source, target)
    for name, version in UNUSED.items():
        empty_distribution(directory, name, version)
    print(f"{target}: {target.stat().st_size / 2**20:.1f} MiB")
    if missing := list(lacking(source, target)):
        sys.exit("\n".join(["headers are missing:", *missing]))


if __name__ == "__main__":
    main()
