"""Which entries of `plugins/attn_triton/blocks.py` are best on this card: Llama 3 8B's heads in bfloat16.

    python -m benchmarks.gpu.tune_attn [decode] [parts] [mixed] [prefill] [eight_bit] [eight_bit_defaults]
                                         [--dry-run]

Every variant is checked against torch's attention in float32 for some rows, then timed by replaying a CUDA graph of ten
calls over random KV. `--dry-run` with TRITON_INTERPRET=1 rehearses on a CPU, in float16 and tiny sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.paged import Paged
from pegboard.plugins.attn_triton.backend import TritonAttention
from pegboard.plugins.attn_triton.options import TritonAttentionOptions as Options
from pegboard.toolkit.model.eight_bit import EIGHT_BIT

MOST_ERROR = 1e-2
"""Relative: bfloat16 keeps 8 bits, so products of probabilities and values are good to 2^-8 each."""

SHAPES = [
    Options(block_keys=keys, warps=warps, stages=stages)
    for keys in (32, 64, 128)
    for warps, stages in ((4, 3), (4, 5), (4, 7), (8, 5), (2, 5))
    if (keys, stages) != (128, 7)
]
FEW = [Options(block_keys=keys, warps=4, stages=stages) for keys, stages in ((64, 3), (64, 5), (32, 5))]
TILES = [
    Options(block_rows=rows, block_keys=keys, warps=warps, stages=stages)
    for rows, keys, warps, stages in (
        (128, 64, 8, 3),
        (128, 64, 8, 5),
        (128, 128, 8, 3),
        (128, 128, 8, 5),
        (64, 64, 4, 5),
        (128, 64, 4, 5),
    )
]


def sweep(name: str, bench: Bench, paged: Paged, variants: Iterable[Options], unit: Callable[[float], float]) -> None:
    """Print what each variant takes, and how far it is off."""
    for options in variants:
        about = " ".join(f"{key} {value}" for key, value in options.model_dump(exclude_defaults=True).items())
        try:
            run = paged.call(TritonAttention(options, paged.ctx))
            error = paged.error(run())
            if not error < MOST_ERROR:
                print(f"{name:>22} {about:>50}: wrong by {error:.1e}", flush=True)
                continue
            took = bench.in_graph(run)
        except Exception as problem:  # a variant that does not fit is a result, too
            print(f"{name:>22} {about:>50}: {type(problem).__name__} {str(problem)[:120]}", flush=True)
        else:
            print(f"{name:>22} {about:>50}: {1e6 * took:9.1f} us {unit(took):8.0f}  error {error:.1e}", flush=True)


def gigabytes(paged: Paged) -> Callable[[float], float]:
    """Return what turns seconds into GB/s of KV."""
    return lambda took: paged.kv_bytes / took / 1e9


def teraflops(paged: Paged) -> Callable[[float], float]:
    """Return what turns seconds into TFLOP/s."""
    return lambda took: paged.flops / took / 1e12


def decode(bench: Bench) -> None:
    """GB/s of KV of decodes that are alike."""
    cases = bench.either(((1, 8192), (8, 2048), (64, 1024), (64, 8192), (256, 1024)), ((2, 300),))
    for count, length in cases:
        paged = Paged(bench, [length] * count)
        all_shapes = (count, length) in ((8, 2048), (64, 1024))
        variants = SHAPES[:2] if bench.dry else SHAPES if all_shapes else FEW
        sweep(f"decode {count} x {length}", bench, paged, [Options(), *variants], gigabytes(paged))


def parts(bench: Bench) -> None:
    """GB/s of KV of decodes that are cut into different numbers of parts."""
    for count, length in bench.either(((1, 1024), (8, 1024), (8, 8192), (32, 1024), (64, 1024)), ((2, 300),)):
        paged = Paged(bench, [length] * count)
        cuts = [Options(kv_parts=number) for number in (1, 2, 4, 8, 16, 32)]
        sweep(f"decode {count} x {length}", bench, paged, [Options(), *cuts], gigabytes(paged))


def mixed(bench: Bench) -> None:
    """GB/s of one long request among short ones, cut into different numbers of parts."""
    paged = Paged(bench, bench.either([512] * 63 + [32768], [40, 40, 300]))
    variants = [Options(kv_parts=parts) for parts in (None, 4, 16, 64)]
    sweep("63 x 512 + 32768", bench, paged, variants, gigabytes(paged))


def prefill(bench: Bench) -> None:
    """TFLOP/s of prompts."""
    for length in bench.either((2048, 8192), (40,)):
        paged = Paged(bench, [length], new=length)
        tiles = TILES[:1] if bench.dry else [Options(), *TILES]
        sweep(f"prefill {length}, TFLOP/s", bench, paged, tiles, teraflops(paged))


def eight_bit(bench: Bench) -> None:
    """GB/s and TFLOP/s of decodes and prompts over keys and values of 8 bits. Those of bfloat16 come first."""
    for kept in (None, *EIGHT_BIT):
        name = "16 bits" if kept is None else str(kept).removeprefix("torch.float8_")
        for count, length in bench.either(((64, 1024), (64, 4096)), ((2, 300),)):
            paged = Paged(bench, [length] * count, kv_dtype=kept)
            variants = SHAPES[:2] if bench.dry else [Options(), *(SHAPES if kept else ())]
            sweep(f"{name} {count} x {length}", bench, paged, variants, gigabytes(paged))
        for length in bench.either((2048, 8192), (40,)):
            paged = Paged(bench, [length], new=length, kv_dtype=kept)
            variants = TILES[:1] if bench.dry else [Options(), *(TILES if kept else ())]
            sweep(f"{name} prefill {length}", bench, paged, variants, teraflops(paged))


def eight_bit_defaults(bench: Bench) -> None:
    """GB/s and TFLOP/s as `eight_bit`, with the sizes of the tables only."""
    for kept in (None, *EIGHT_BIT):
        name = "16 bits" if kept is None else str(kept).removeprefix("torch.float8_")
        for count, length in bench.either(((1, 8192), (8, 1024), (64, 1024), (64, 4096)), ((2, 300),)):
            paged = Paged(bench, [length] * count, kv_dtype=kept)
            sweep(f"{name} {count} x {length}", bench, paged, [Options()], gigabytes(paged))
        for length in bench.either((2048, 8192), (40,)):
            paged = Paged(bench, [length], new=length, kv_dtype=kept)
            sweep(f"{name} prefill {length}", bench, paged, [Options()], teraflops(paged))


WHAT: dict[str, Callable[[Bench], None]] = {
    "decode": decode,
    "parts": parts,
    "mixed": mixed,
    "prefill": prefill,
    "eight_bit": eight_bit,
    "eight_bit_defaults": eight_bit_defaults,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep what is named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(WHAT), help=", ".join(WHAT))
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args(arguments)
    bench = Bench(given.dry_run)
    with torch.inference_mode():
        for name in given.what:
            WHAT[name](bench)


if __name__ == "__main__":
    main()
