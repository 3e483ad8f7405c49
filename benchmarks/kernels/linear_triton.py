"""Products with quantised weights: the matrices of Llama 3 8B's layers, in the layouts that are published most."""

from __future__ import annotations

import functools

import torch

from benchmarks.kernels import Case, Target
from pegboard.plugins.linear_triton.options import TritonProductsOptions
from pegboard.plugins.linear_triton.products import TritonProducts
from pegboard.plugins.quantization.api import LinearContext
from pegboard.toolkit.model.layouts import Code, Codes, Layout
from pegboard.toolkit.model.linear import Part, Site

LAYOUTS = {
    "int4 128": Layout(Code.INT4, (1, 128)),
    "uint4 128 zeros": Layout(Code.UINT4, (1, 128), zeros=True),
    "uint4 32 zeros": Layout(Code.UINT4, (1, 32), zeros=True),
    "e2m1 32": Layout(Code.E2M1, (1, 32)),
    "e2m1 16": Layout(Code.E2M1, (1, 16)),
    "e4m3 128x128": Layout(Code.E4M3, (128, 128)),
    "e4m3 row": Layout(Code.E4M3, (1, 0)),
    "int8 row": Layout(Code.INT8, (1, 0)),
}
SHAPES = {"down": (4096, 14336), "gate and up": (28672, 4096)}


def codes_of(layout: Layout, rows: int, cols: int, device: str, scales: torch.dtype = torch.float16) -> Codes:
    """Return codes without data."""
    kinds = {Code.E4M3: torch.float8_e4m3fn, Code.E5M2: torch.float8_e5m2, Code.INT8: torch.int8}
    kind = kinds.get(layout.code, torch.uint8)
    grid = layout.grid(rows, cols)
    zeros = torch.empty(grid, dtype=torch.uint8, device=device) if layout.zeros else None
    packed = torch.empty(rows, cols // (2 if layout.code.packed else 1), dtype=kind, device=device)
    return Codes(packed, torch.empty(grid, dtype=scales, device=device), zeros)


def _product(target: Target, layout: Layout, rows: int, cols: int, tokens: int, dtype: torch.dtype) -> None:
    linears = TritonProducts(TritonProductsOptions(), LinearContext(torch.device("meta"), dtype))
    site = Site(0, (Part("weight", rows),), cols)
    linears.build(site, [(layout, codes_of(layout, rows, cols, "meta"))]).apply(target.empty(tokens, cols, dtype=dtype))


CASES = tuple(
    Case(
        f"{name} {which}, {tokens} tokens {str(dtype).removeprefix('torch.')}",
        functools.partial(_product, layout=layout, rows=rows, cols=cols, tokens=tokens, dtype=dtype),
        frozenset({"product_kernel"}) if tokens <= 128 else frozenset(),
    )
    for name, layout in LAYOUTS.items()
    for which, (rows, cols) in SHAPES.items()
    for tokens, dtype in ((1, torch.bfloat16), (1, torch.float16), (64, torch.bfloat16), (256, torch.bfloat16))
)  # fmt: skip
