"""Decode speed of the native runner with codes of 4 bits, beside the same weights in 12 bits (`runner.weights: bf12`).

    python -m benchmarks.four_bits [--formats awq gptq q4_0 q4_1] [--streams 1 8] [--rounds 9] [--output 64]
        [--instructions auto avx2] [--cache DIR]

The checkpoints are the demo model's own weights, rounded again to each format: AWQ and GPTQ in groups of 64 columns, as
safetensors with the head in bf16; Q4_0 and Q4_1 as GGUF by the gguf package, with embeddings and head in Q8_0 as the
demo model's file has them. Engines of both kinds take turns in one process, a short run each. Printed are the median of
output tokens per second; the median, the lowest and the highest ratio of neighbouring runs, for both of which counts
what else the machine does then; and the quickest run of each, on a busy machine the one nearest to what it can do.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.decode import measure
from pegboard.core.engine.engine import Engine
from pegboard.toolkit.system.cache_dir import default_cache_dir

FORMATS = ("awq", "gptq", "q4_0", "q4_1")
GROUP = 64
KEPT = ("bf16", "bf12")
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def main() -> None:
    args = arguments()
    for name in args.formats:
        path = checkpoint(name, args.cache)
        for instructions in args.instructions:
            codes, twelve = (engine(path, kept, instructions) for kept in KEPT)
            with codes, twelve:
                for streams in args.streams:
                    compare(f"{name} {instructions}", (codes, twelve), streams, args.output, args.rounds)


def engine(path: Path, kept: str, instructions: str) -> Engine:
    words = [f"model.path={path}", "runner.use=cpu_native", f"runner.weights={kept}"]
    return Engine.from_config({}, "examples/quickstart.yaml", overrides=[*words, f"runner.instructions={instructions}"])


def compare(title: str, engines: tuple[Engine, Engine], streams: int, n_out: int, rounds: int) -> None:
    """Print what the first of two engines does beside the second."""
    rng = random.Random(0)
    found = [[measure(engine, streams, 16, n_out, rng)["tok/s"] for engine in engines] for _ in range(rounds + 1)][1:]
    ratios = sorted(codes / twelve for codes, twelve in found)
    medians, best = ([take(column) for column in zip(*found, strict=True)] for take in (statistics.median, max))
    neighbours = f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    quickest = f"quickest {best[0]:.0f} and {best[1]:.0f}, {best[0] / best[1]:.2f}"
    print(
        f"{title}, {streams} streams: {medians[0]:.0f} tok/s, bf12 {medians[1]:.0f}; {neighbours}; {quickest}",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--instructions", nargs="+", default=["auto"])
    parser.add_argument("--cache", type=Path, default=default_cache_dir() / "four_bits")
    return parser.parse_args()


def checkpoint(name: str, cache: Path) -> Path:
    """Return the demo model in a format, made once: a directory or a file."""
    target = cache / (f"smollm2.{name}.gguf" if name.startswith("q") else f"smollm2-{name}")
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f"draft.{target.name}")
    if name.startswith("q"):
        write_gguf(draft, name.upper())
    else:
        shutil.rmtree(draft, ignore_errors=True)
        write_groups(draft, cache, name)
    draft.rename(target)
    return target


def write_gguf(target: Path, kind: str) -> None:
    """Write the demo model's file with its matrices of 4 bits in another format. Everything else stays."""
    import gguf

    from benchmarks.peers.models import demo_gguf

    reader = gguf.GGUFReader(demo_gguf())
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        writer.add_key_value(field.name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if stored is gguf.GGMLQuantizationType.Q4_1 and kind != "Q4_1":
            stored = gguf.GGMLQuantizationType[kind]
            data = gguf.quantize(gguf.dequantize(tensor.data, tensor.tensor_type), stored)
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_groups(target: Path, cache: Path, method: str) -> None:
    """Write the demo model as AutoAWQ or AutoGPTQ would, each number rounded to the nearest."""
    from safetensors.torch import load_file, save_file

    from benchmarks.peers.models import bf16_directory

    plain = bf16_directory(cache)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        packed = grouped(tensor.float(), method)
        tensors |= {f"{name.removesuffix('weight')}{end}": one.contiguous() for end, one in packed.items()}
    target.mkdir()
    for file in plain.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, target / file.name)
    config = json.loads((plain / "config.json").read_text("utf-8"))
    told = {"quant_method": method, "bits": 4, "group_size": GROUP, "version": "gemm"}
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": told}), "utf-8")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def grouped(matrix: torch.Tensor, method: str) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a matrix [rows, cols], with zero points."""
    rows, cols = matrix.shape
    groups = matrix.view(rows, -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-5).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15).view(rows, cols)
    if method == "awq":
        return {
            "qweight": words(codes.t(), AWQ_ORDER), "qzeros": words(zeros.t(), AWQ_ORDER), "scales": scales.t(),
        }  # fmt: skip
    return {
        "qweight": words(codes, range(8)).t(),
        "qzeros": words((zeros.t() - 1) % 16, range(8)),
        "scales": scales.t(),
        "g_idx": (torch.arange(cols) // GROUP).int(),
    }


def words(numbers: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Pack eight neighbours along the last dimension into an int32."""
    eights = numbers.to(torch.int64).numpy().astype(np.uint32).reshape(numbers.shape[0], -1, 8)[:, :, list(order)]
    packed = (eights << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)
    return torch.from_numpy(packed.view(np.int32))


if __name__ == "__main__":
    main()
