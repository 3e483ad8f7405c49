"""How fast products with quantised weights are on this card, and which tiles are best: matrices of Llama 3 8B.

    python -m benchmarks.gpu.tune_linear [NAME ...] [--tokens 1 16 64] [--sweep] [--dry-run]

Each product is compared with that of the dequantised matrix in float32, and timed by a graph over several copies of
the matrix, more than the card's second-level cache holds. The last column is the time of torch's product with 16-bit
weights divided by it. `--sweep` tries tiles. `--dry-run` with TRITON_INTERPRET=1 rehearses on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.kernels.linear_triton import LAYOUTS
from pegboard.plugins.linear_triton.options import TritonProductsOptions as Options
from pegboard.plugins.linear_triton.products import TritonProducts
from pegboard.plugins.quantization.api import LinearContext
from pegboard.toolkit.model.layouts import Code, Codes, Layout, exact
from pegboard.toolkit.model.linear import LinearMethod, Part, Site

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
COLD = 200e6
"""Bytes that are read before a matrix is read again."""
MOST_ERROR = 1e-2
TILES = [
    Options(block_rows=rows, warps=warps, stages=stages, waves=waves)
    for rows, warps, stages, waves in (
        (64, 4, 3, 4),
        (64, 4, 3, 8),
        (64, 4, 5, 4),
        (128, 4, 3, 4),
        (128, 4, 3, 2),
        (128, 4, 5, 4),
        (128, 8, 3, 4),
        (256, 8, 3, 2),
    )
]


def drawn(bench: Bench, layout: Layout, rows: int, cols: int) -> Codes:
    """Return random codes whose numbers are about 1 in size."""
    device, code = bench.device, layout.code
    if code in (Code.E4M3, Code.E5M2):
        codes = torch.randn(rows, cols, device=device).to(
            torch.float8_e4m3fn if code is Code.E4M3 else torch.float8_e5m2
        )
    else:
        kind = torch.int8 if code is Code.INT8 else torch.uint8
        width = cols // 2 if code.packed else cols
        codes = torch.randint(0, 256, (rows, width), dtype=torch.uint8, device=device).view(kind)
    grid = layout.grid(rows, cols)
    scales = (0.5 + torch.rand(grid, device=device)).to(bench.dtype)
    zeros = torch.randint(5, 11, grid, device=device).to(torch.uint8) if layout.zeros else None
    return Codes(codes, scales, zeros)


def built(bench: Bench, layout: Layout, codes: Codes, options: Options) -> LinearMethod:
    rows = codes.codes.shape[0]
    cols = codes.codes.shape[1] * (2 if layout.code.packed else 1)
    linears = TritonProducts(options, LinearContext(bench.device, bench.dtype))
    return linears.build(Site(0, (Part("weight", rows),), cols), [(layout, codes)])


def seconds(bench: Bench, runs: Sequence[LinearMethod | Tensor], x: Tensor) -> float:
    """Return the seconds of one product, of several in turn."""

    def run() -> None:
        for weight in runs:
            F.linear(x, weight) if isinstance(weight, Tensor) else weight.apply(x)

    return bench.in_graph(run, 3) / len(runs)


def measure(
    bench: Bench, name: str, shape: str, tokens: Sequence[int], variants: Sequence[Options], peak: float
) -> None:
    """Print a row per count of tokens and variant."""
    layout = LAYOUTS[name]
    rows, cols = bench.either(SHAPES[shape], (96, 256))
    codes = drawn(bench, layout, rows, cols)
    wide = exact(layout, codes, torch.float32)
    copies = bench.either(max(1, round(COLD / codes.nbytes)), 1)
    plain = [wide.to(bench.dtype) for _ in range(bench.either(max(1, round(COLD / (2 * rows * cols))), 1))]
    for options in variants:
        about = " ".join(f"{key} {value}" for key, value in options.model_dump(exclude_defaults=True).items())
        for count in tokens:
            x = torch.randn(count, cols, device=bench.device).to(bench.dtype)
            label = f"{name:>16} {shape:>12} {count:>4} tokens {about:>42}"
            try:
                runs = [built(bench, layout, codes, options) for _ in range(copies)]
                expected = x.float() @ wide.T
                error = float((runs[0].apply(x).float() - expected).abs().max() / expected.abs().max())
                took, torchs = seconds(bench, runs, x), seconds(bench, plain, x)
            except Exception as problem:  # a variant that does not fit is a result, too
                print(f"{label}: {type(problem).__name__} {str(problem)[:120]}", flush=True)
                continue
            right = "" if error < MOST_ERROR else f"  WRONG by {error:.1e}"
            print(
                f"{label}: {1e6 * took:8.1f} us {codes.nbytes / took / peak:6.2f} of a copy, "
                f"{torchs / took:5.2f} x 16 bits{right}",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the layouts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(LAYOUTS), metavar="NAME", help=", ".join(LAYOUTS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(arguments)
    bench = Bench(given.dry_run)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.inference_mode():
        peak = bench.bandwidth()
        print(f"a copy reads and writes {peak / 1e12:.2f} TB/s", flush=True)
        for name in given.names:
            for shape in SHAPES if not given.sweep else ("gate and up", "o"):
                measure(bench, name, shape, given.tokens, TILES if given.sweep else [Options()], peak)


if __name__ == "__main__":
    main()
