"""How near a step is to what the machine can do: memory bandwidth, the rate of products, and steps against both.

    python -m benchmarks.roofline [--model DIR] [--batch 1 8 32] [--context 200] [--set KEY=VALUE ...] [--json FILE]

Bandwidth is that of a plain reading loop (benchmarks/roofline.cpp, compiled here with the system's compiler), at the
size of what a step reads and at others, by one thread and by all, with huge pages and without. A decode step must read
all weights once, and each request's KV: these bytes at the bandwidth measured at as many. It must multiply, too: its
operations at the measured rate. The limit is whichever takes longer. A prefill must multiply. Steps are those of
`pegboard bench step`.

A cache that holds the weights, or another program, moves all of it: compare within one run. How many bytes the weights
are, the runner says: --set runner.use=cpu_native --set runner.weights=bf12 has its own limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy import DEMO, directory_of
from pegboard.core.interfaces.errors import PegboardError
from pegboard.plugins.cpu_native.library import NativeError, compiler, cpu_flags

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = {
    "avx2": "-mavx2",
    "fma": "-mfma",
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512vl": "-mavx512vl",
    "avx512_bf16": "-mavx512bf16",
    "amx_tile": "-mamx-tile",
    "amx_bf16": "-mamx-bf16",
}
"""Compiler flags by the CPU's own. Not -march=native, which on virtual machines takes for granted what is not there."""
SIZES_MB = (64, 1024)
"""Measured beside what the steps read: one that a large cache holds, and one that none does."""


@dataclass(frozen=True)
class Shape:
    """What a step of a model must read and multiply."""

    weights: int
    """Numbers in all matrices that a step multiplies by, the head's included; the embedding's rows are nothing beside
    them.
    """
    head: int
    """Those of the head, which a prefill multiplies by for its last token only."""
    kv_numbers: int
    """Numbers that one token keeps."""
    heads_width: int
    """Query heads times their size, of all layers: what a token multiplies by for each token behind it, twice."""

    @classmethod
    def of(cls, directory: Path) -> Shape:
        """From a Hugging Face directory of a Llama-like model. Raises PegboardError."""
        from safetensors import safe_open

        config = json.loads((directory / "config.json").read_text("utf-8"))
        counts: dict[str, int] = {}
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, "np") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    size = 1
                    for one in opened.get_slice(name).get_shape():
                        size *= one
                    counts[name] = size
        embedding = counts.get("model.embed_tokens.weight")
        if embedding is None:
            raise PegboardError(f"{directory}: no safetensors with model.embed_tokens.weight")
        head = counts.get("lm_head.weight", embedding)
        total = sum(counts.values())
        # A tied head is the embedding; otherwise the embedding is looked up and not multiplied by.
        weights = total - embedding if "lm_head.weight" in counts else total
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            weights, head, 2 * layers * (config.get("num_key_value_heads") or heads) * size, layers * heads * size
        )

    def kv_bytes(self, batch: int, context: int) -> float:
        """In bf16, that one decode step must read."""
        return batch * context * self.kv_numbers * 2.0

    def decode_operations(self, batch: int, context: int) -> float:
        """Of one step: two for each weight and request, and attention's two products."""
        return 2.0 * self.weights * batch + 4.0 * self.heads_width * batch * context

    def prefill_operations(self, tokens: int) -> float:
        """Of a prompt: two for each weight and token, and the causal half of attention's two products."""
        products = 2.0 * ((self.weights - self.head) * tokens + self.head)
        return products + 4.0 * self.heads_width * tokens * (tokens + 1) / 2


@dataclass(frozen=True)
class Bandwidth:
    """Of one reading loop."""

    megabytes: int
    threads: int
    huge: bool
    gigabytes_per_s: float
    in_huge_pages: bool
    """Whether the kernel gave them."""


def compile_loop(folder: Path, flags: frozenset[str]) -> Path:
    """Compile the program of roofline.cpp. Raises PegboardError where there is no compiler, or it fails."""
    try:
        command = [*compiler(), "-O3", "-std=c++17", "-pthread"]
    except NativeError as error:
        raise PegboardError(f"the reading loop is compiled, and that cannot be done here: {error}") from None
    program = folder / "roofline"
    command += [*(flag for name, flag in FLAGS.items() if name in flags), str(SOURCE), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PegboardError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return program


def _words(program: Path, *arguments: object) -> list[str]:
    done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PegboardError(f"{program.name} {' '.join(map(str, arguments))}: {done.stderr.strip() or done.returncode}")
    return done.stdout.split(maxsplit=1)


def bandwidth(program: Path, megabytes: int, threads: int, huge: bool, seconds: float) -> Bandwidth:
    """Measure bytes read per second, of the best pass within `seconds`."""
    rate, mapped = _words(program, "read", megabytes, threads, int(huge), seconds)
    return Bandwidth(megabytes, threads, huge, float(rate), float(mapped) > megabytes / 2)


def multiply(program: Path, threads: int, seconds: float) -> tuple[float, str]:
    """1e9 operations per second of the best pass, and by which unit."""
    rate, unit = _words(program, "multiply", threads, seconds)
    return float(rate), unit.strip()


def step(model: str, overrides: Sequence[str], *shape: object) -> dict[str, Any]:
    """`pegboard bench step` of this shape. Raises PegboardError with what it says."""
    with tempfile.TemporaryDirectory(prefix="pegboard-roofline-") as folder:
        file = Path(folder, "step.json")
        command = [
            sys.executable,
            "-m",
            "pegboard.core.cli.main",
            "bench",
            "step",
            *map(str, shape),
            "--json",
            str(file),
        ]
        for one in (f"model.path={model}", "model.dtype=bfloat16", *overrides):
            command += ["--set", one]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not file.is_file():
            raise PegboardError(f"pegboard bench step failed:\n{(done.stderr or done.stdout)[-1500:]}")
        written = json.loads(file.read_text("utf-8"))
        found: dict[str, Any] = {**written["step"], "weight_bytes": written["engine"]["weight_bytes"]}
        return found


def measure(args: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Return everything, as it is written."""
    flags, cores = cpu_flags(), len(os.sched_getaffinity(0))
    shape = Shape.of(directory_of(args.model))
    decodes = [_decode(args, batch) for batch in args.batch]
    prefill = _prefill(args) if args.prefill else None
    told = next((one["weight_bytes"] for one in (*decodes, prefill) if one is not None), None)
    weights = shape.weights * args.bits / 8 if args.bits else told or shape.weights * 2
    kv = [shape.kv_bytes(batch, args.context) for batch in args.batch]
    read = [max(1, round((weights + one) / 2**20)) for one in kv]
    found: dict[str, Any] = {"model": args.model, "set": args.overrides, "cores": cores, "weight_bytes": weights}
    found["bits_per_weight"] = weights * 8 / shape.weights
    with tempfile.TemporaryDirectory(prefix="pegboard-roofline-") as folder:
        program = compile_loop(Path(folder), flags)
        sizes = sorted({*SIZES_MB, *read})
        rates = []
        for size in sizes:
            for threads in sorted({1, cores}):
                for huge in (False, True):
                    rates.append(bandwidth(program, size, threads, huge, args.seconds))
                    say(line_of(rates[-1]))
        found["bandwidth"] = [asdict(one) for one in rates]
        rate, unit = multiply(program, cores, args.seconds)
        found["multiply"] = {"threads": cores, "unit": unit, "giga_operations_per_s": rate}
        say(f"products: {rate:.0f} G operations/s by {unit}, {cores} threads")
    found["decode"] = []
    for batch, took, size, one in zip(args.batch, decodes, read, kv, strict=True):
        best = max(loop.gigabytes_per_s for loop in rates if loop.threads == cores and loop.megabytes == size)
        operations = shape.decode_operations(batch, args.context)
        limits = {"reading": (weights + one) / best / 1e6, "multiplying": operations / rate / 1e6}
        by = max(limits, key=lambda name: limits[name])
        about = {"batch": batch, "context": args.context, "weight_bytes": weights, "kv_bytes": one}
        more = {"gigabytes_per_s": best, "operations": operations, "limit_by": by}
        found["decode"].append({**_against(took, limits[by]), **about, **more})
    found["prefill"] = None
    if prefill is not None:
        operations = shape.prefill_operations(args.prefill)
        against = _against(prefill, operations / rate / 1e6)
        found["prefill"] = {**against, "tokens": args.prefill, "operations": operations}
    return found


def _decode(args: argparse.Namespace, batch: int) -> dict[str, Any]:
    return step(args.model, args.overrides, "--mode", "decode", "--batch", batch, "--context", args.context)


def _prefill(args: argparse.Namespace) -> dict[str, Any]:
    return step(
        args.model, args.overrides, "--mode", "prefill", "--batch", 1, "--context", 0, "--extend", args.prefill,
        "--repetitions", 8, "--warmup", 2,
    )  # fmt: skip


def _against(took: dict[str, Any], limit: float) -> dict[str, Any]:
    """Return a step's times and how much of the limit it reaches; all in milliseconds."""
    forward, whole = took["stages_ms"]["forward"], took["total_ms"]
    return {
        "limit_ms": limit,
        "forward_ms": {"median": forward["median"], "min": forward["min"]},
        "step_ms": {"median": whole["median"], "min": whole["min"]},
        "share_of_limit": limit / forward["median"],
    }


def line_of(one: Bandwidth) -> str:
    """For people."""
    pages = "huge pages" if one.huge else "small pages"
    refused = " (the kernel gave none)" if one.huge and not one.in_huge_pages else ""
    return f"read {one.megabytes} MB, {one.threads} threads, {pages}: {one.gigabytes_per_s:.1f} GB/s{refused}"


def table(found: dict[str, Any]) -> Iterator[str]:
    """Yield the steps, in Markdown."""
    yield (
        f"{found['bits_per_weight']:.3g} bits per weight, "
        f"{found['multiply']['giga_operations_per_s']:.0f} G operations/s by {found['multiply']['unit']}"
    )
    yield ""
    yield (
        "| step | weights MB | KV MB | GB/s | G operations | limit by | limit ms | forward ms, median (min) "
        "| whole step ms | of the limit |"
    )
    yield "|" + " --- |" * 10
    for one in found["decode"]:
        yield (
            f"| decode, {one['batch']} × {one['context']} | {one['weight_bytes'] / 1e6:.0f} | "  # noqa: RUF001
            f"{one['kv_bytes'] / 1e6:.0f} | {one['gigabytes_per_s']:.1f} | {one['operations'] / 1e9:.1f} | "
            f"{one['limit_by']} | {_times(one)}"
        )
    if one := found["prefill"]:
        yield f"| prefill of {one['tokens']} | | | | {one['operations'] / 1e9:.0f} | multiplying | {_times(one)}"


def _times(one: dict[str, Any]) -> str:
    forward = one["forward_ms"]
    return (
        f"{one['limit_ms']:.2f} | {forward['median']:.2f} ({forward['min']:.2f}) | {one['step_ms']['median']:.2f} | "
        f"{one['share_of_limit']:.0%} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO, help="a Hugging Face directory; by default the demo model")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=200, help="tokens behind each request of a decode step")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt; 0: no prefill")
    parser.add_argument("--bits", type=float, help="of a stored weight; by default what the runner says, or 16")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each measurement of the machine")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        found = measure(args, lambda text: print(text, flush=True))
    except (PegboardError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(("", *table(found))))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
