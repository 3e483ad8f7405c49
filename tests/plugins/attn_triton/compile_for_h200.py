"""Compiles the kernels for an H200 (sm_90) with Triton's own ptxas, which needs no GPU. Run by test_compile.py.

python tests/plugins/attn_triton/compile_for_h200.py bf16-128-4 ...     # dtype, head dim, query heads per KV head

It prints a line of JSON per kernel: shared memory, registers and spills, wgmma instructions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pegboard.conformance.attention_fakes import make_layer
from pegboard.plugins.attn_triton import kernels
from pegboard.plugins.attn_triton.launch import Blocks, Kind, decode_blocks, extend_blocks, power_of_two
from pegboard.plugins.attn_triton.options import TritonAttentionOptions

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
INT32 = {"tiles", "row_table"}
INT64 = {"rows", "start_locs", "prefix_lens", "new_lens", "tail_lens", "tail_bits", "tokens", "seq_lens"}
FLOAT32 = {"tops", "parts"}
TENSORS = {"q", "out", "keys", "values", "sinks"}


def signature(name: str, dtype: str, split: bool) -> str:
    if name in INT32:
        return "*i32"
    if name in INT64:
        return "*i64"
    if name in FLOAT32 or (name == "out" and split):
        return "*fp32"
    if name in TENSORS:
        return f"*{dtype}"
    return "fp32" if name in ("scale", "cap") else "i32"


def compile_kernel(
    kernel: Any, dtype: str, constants: Mapping[str, Any], blocks: Blocks, split: bool = False
) -> dict[str, Any]:
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else signature(name, dtype, split) for name in names}
    # As for real tensors: pointers are aligned, and strides are multiples of 16.
    aligned = {
        (at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types[name][0] == "*" or "_" in name
    }
    aligned = {at: one for at, one in aligned.items() if types[names[at[0]]] != "constexpr"}
    source = ASTSource(kernel, types, {(names.index(name),): one for name, one in constants.items()}, aligned)
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    found = {"kernel": kernel.__name__, "shared": compiled.metadata.shared, **resources(compiled.asm["cubin"])}
    return {**found, "wgmma": compiled.asm["ptx"].count("wgmma.mma_async")}


def resources(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    return {"registers": int(match[1]), "spilled": int(match[2])}


def compile_all(dtype: str, dim: int, group: int) -> Iterator[dict[str, Any]]:
    layer = make_layer(8 * group, 8, dim)
    kind, options = Kind.of(layer), TritonAttentionOptions()
    padded = power_of_two(dim)
    shared = {"GROUP": group, "D": dim, "DV": dim, "BLOCK_D": padded, "BLOCK_DV": padded}
    flags = {"HAS_WINDOW": True, "HAS_CAP": True, "HAS_SINKS": True}
    for tails in (False, True):
        extend = extend_blocks(kind, ITEMSIZE[dtype], 4096 * group, options, tails=tails)
        sizes = {"TOKENS": extend.rows // group, "BLOCK_M": extend.rows, "BLOCK_N": extend.keys}
        yield compile_kernel(kernels.extend_kernel, dtype, {**shared, **flags, **sizes, "HAS_TAIL": tails}, extend)
    decode = decode_blocks(kind, ITEMSIZE[dtype], options)
    for split in (True, False):
        sizes = {"BLOCK_H": decode.rows, "BLOCK_N": decode.keys, "SPLIT": split}
        yield compile_kernel(kernels.decode_kernel, dtype, {**shared, **flags, **sizes}, decode, split)
    constants = {"DV": dim, "BLOCK_S": 64, "BLOCK_DV": padded, "HAS_WINDOW": True, "HAS_SINKS": True}
    yield compile_kernel(kernels.reduce_kernel, dtype, constants, Blocks(0, 0, decode.warps, decode.stages))


if __name__ == "__main__":
    for shape in sys.argv[1:]:
        dtype, dim, group = shape.split("-")
        for kernel in compile_all(dtype, int(dim), int(group)):
            print(json.dumps({"shape": shape, **kernel}), flush=True)  # noqa: T201
