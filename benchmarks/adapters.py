"""What LoRA adapters cost decodes: none in the batch, one for all, a different one for each, and one being loaded.

    python -m benchmarks.adapters [--model DIR] [--streams 8] [--rank 16] [--runs 5] [--input 128] [--output 96]
        [--loads 8] [--set KEY=VALUE ...] [--json FILE]

Two engines in one process take turns, one without adapters and one with them; adapters have random numbers, on all
projections. What counts is the median time of a decode step of all streams. Limits: no adapter in the batch at least
0.98 of the speed of the engine without; one for all at least 0.85; different ones at least 0.8 of what their bytes
allow, which is weights and KV over weights, KV and adapters, all as kept. While adapters of about 50 MB are loaded
beside the streams, the 99th percentile of the time between tokens is at most 1.5 times that without. Ends with 1 where
a limit is not met.

Other programs on the machine move all of it: rounds alternate, and ratios are of one run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy import DEMO, directory_of
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.sampling import SamplingParams

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LIMITS = {"none": 0.98, "one": 0.85}
OF_BYTES = 0.8
LOADING = 1.5
LOADED_BYTES = 50_000_000


@dataclass(frozen=True)
class Bytes:
    """What a step of all streams reads: the weights, KV, and the adapters of all streams."""

    weights: int
    kv: int
    adapters: int

    @property
    def allowed(self) -> float:
        """The speed that bytes allow with different adapters, as a share of that without."""
        return (self.weights + self.kv) / (self.weights + self.kv + self.adapters)


@dataclass(frozen=True)
class Found:
    """Median milliseconds of a decode step by arm; the 99th percentile of the time between tokens, quiet and beside
    loads, of `loads` adapters of `loaded_bytes`.
    """

    streams: int
    steps: Mapping[str, float]
    nbytes: Bytes
    quiet_p99: float
    loading_p99: float
    loads: int
    loaded_bytes: int

    def speed(self, arm: str) -> float:
        """Of an arm, as a share of the speed of the engine without adapters."""
        return self.steps["without"] / self.steps[arm]

    @property
    def checks(self) -> dict[str, tuple[float, float, bool]]:
        """What was found, its limit, and whether it is met."""
        found = {arm: (self.speed(arm), limit, self.speed(arm) >= limit) for arm, limit in LIMITS.items()}
        least = OF_BYTES * self.nbytes.allowed
        found["different"] = self.speed("different"), least, self.speed("different") >= least
        ratio = self.loading_p99 / self.quiet_p99
        found["loading"] = ratio, LOADING, ratio <= LOADING
        return found


def write_adapter(directory: Path, sizes: Mapping[str, tuple[int, int]], rank: int, seed: int) -> Path:
    """Write an adapter in PEFT's format for layers of these names, [rows, columns] each."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in sizes.items():
        for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = 0.02 * torch.randn(shape, generator=draw)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(PROJECTIONS), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return directory


def projections(directory: Path) -> dict[str, tuple[int, int]]:
    """Return the sizes of all projections of a model, by name. Raises PegboardError."""
    from safetensors import safe_open

    found: dict[str, tuple[int, int]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                if name.endswith(tuple(f"{projection}.weight" for projection in PROJECTIONS)):
                    rows, columns = opened.get_slice(name).get_shape()
                    found[name.removesuffix(".weight")] = rows, columns
    if not found:
        raise PegboardError(f"{directory} has no projections in safetensors")
    return found


class Streams:
    """Requests that decode together, and the times of their steps in seconds."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]], names: Sequence[str], output: int) -> None:
        self._engine = engine
        sampling = SamplingParams(max_new_tokens=output, temperature=0.0, ignore_eos=True)
        engine.flush_cache()
        self._left = {
            engine.submit(
                GenerateRequest(prompt=prompt, sampling=sampling, params={"adapter": name} if name else {}, stream=True)
            )
            for prompt, name in zip(prompts, names, strict=True)
        }

    def steps(self) -> Iterator[float]:
        """Yield how long each step took that has given all of them a token, the first of a request not counted."""
        seen: set[str] = set()
        last = time.perf_counter()
        while self._left:
            chunks = self._engine.poll()
            now = time.perf_counter()
            got = {chunk.rid for chunk in chunks if chunk.token_ids}
            if got == self._left and seen == self._left:
                yield now - last
            seen |= got
            last = now
            self._left -= {chunk.rid for chunk in chunks if chunk.finish_reason is not None}


def measure_steps(
    engines: Mapping[bool, Engine], arms: Mapping[str, Sequence[str]], args: argparse.Namespace
) -> dict[str, float]:
    """Return the median milliseconds of a step by arm. Arms alternate, forwards and backwards."""
    draw = random.Random(0)
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for run in range(args.runs + 1):
        for arm in list(arms)[:: -1 if run % 2 else 1]:
            engine = engines[arm != "without"]
            prompts = _prompts(engine, args, draw)
            times = list(Streams(engine, prompts, arms[arm], args.output).steps())
            if run:  # the first round warms up
                found[arm] += times
    return {arm: 1000 * statistics.median(times) for arm, times in found.items()}


def measure_loads(engine: Engine, path: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Return the 99th percentile of the time between tokens in milliseconds, without loads and beside them."""
    draw = random.Random(1)
    quiet: list[float] = []
    beside: list[float] = []
    left = args.loads

    def state(uid: int) -> object:
        return engine.control("adapter_state", uid=uid)["state"]

    while left:
        quiet += Streams(engine, _prompts(engine, args, draw), [""] * args.streams, args.output).steps()
        uid = 0
        for seconds in Streams(engine, _prompts(engine, args, draw), [""] * args.streams, args.output).steps():
            if uid:
                beside.append(seconds)
                if state(uid) == "ready":
                    engine.control("unload_adapter", name="loaded")
                    uid = 0
                    left -= 1
            elif left:
                uid = _number(engine.control("load_adapter", name="loaded", path=str(path))["uid"])
        if uid:
            while state(uid) == "loading":
                time.sleep(0.01)
            engine.control("unload_adapter", name="loaded")
    return _p99(quiet), _p99(beside)


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


def _prompts(engine: Engine, args: argparse.Namespace, draw: random.Random) -> list[list[int]]:
    return [[draw.randrange(3, engine.info.vocab_size) for _ in range(args.input)] for _ in range(args.streams)]


def _p99(seconds: Sequence[float]) -> float:
    return 1000 * statistics.quantiles(seconds, n=100)[98]


def measure(args: argparse.Namespace) -> Found:
    """Measure all arms. Raises PegboardError."""
    directory = directory_of(args.model)
    sizes = projections(directory)
    numbers = sum(rows + columns for rows, columns in sizes.values())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        names = [f"a{number}" for number in range(args.streams)]
        preload = {
            name: str(write_adapter(folder / name, sizes, args.rank, seed)) for seed, name in enumerate(names, 1)
        }
        rank = max(1, min(64, args.loaded_bytes // (4 * numbers)))
        loaded = write_adapter(folder / "loaded", sizes, rank, 0)
        config: dict[str, Any] = {
            "model": {"path": args.model, "dtype": "bfloat16", "device": "cpu"},
            "memory": {"max_total_tokens": 2 * args.streams * (args.input + args.output)},
            "log_level": "error",
        }
        section = {"preload": preload, "slots": args.streams, "directories": [str(folder)]}
        with (
            Engine.from_config(config, overrides=args.overrides) as without,
            Engine.from_config({**config, "adapters": section}, overrides=args.overrides) as engine,
        ):
            nothing = [""] * args.streams
            arms = {"without": nothing, "none": nothing, "one": names[:1] * args.streams, "different": names}
            steps = measure_steps({False: without, True: engine}, arms, args)
            quiet, beside = measure_loads(engine, loaded, args)
            context = args.input + args.output // 2
            nbytes = Bytes(
                weights=without.built.runner.weight_bytes() or 0,
                kv=engine.info.kv_bytes_per_token * context * args.streams,
                adapters=2 * args.rank * numbers * args.streams,
            )
    return Found(args.streams, steps, nbytes, quiet, beside, args.loads, 4 * rank * numbers)


def lines(found: Found) -> Iterator[str]:
    """Yield what is printed."""
    nbytes = found.nbytes
    yield (
        f"{found.streams} streams; bytes of a step: weights {nbytes.weights / 1e6:.1f} MB, KV {nbytes.kv / 1e6:.1f} "
        f"MB, different adapters {nbytes.adapters / 1e6:.1f} MB, which allow {nbytes.allowed:.3f}"
    )
    yield "; ".join(f"{arm} {step:.2f} ms" for arm, step in found.steps.items())
    yield (
        f"time between tokens, p99: {found.quiet_p99:.2f} ms; beside {found.loads} loads of "
        f"{found.loaded_bytes / 1e6:.0f} MB {found.loading_p99:.2f} ms"
    )
    for name, (value, limit, fine) in found.checks.items():
        sign = "at most" if name == "loading" else "at least"
        yield f"{name}: {value:.3f}, {sign} {limit:.3f}: {'met' if fine else 'NOT MET'}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default=DEMO, help="a Hugging Face directory; by default the demo model")
    for name, default in (("streams", 8), ("rank", 16), ("runs", 5), ("input", 128), ("output", 96), ("loads", 8)):
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--loaded-bytes", type=int, default=LOADED_BYTES)
    made.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    made.add_argument("--json", type=Path)
    return made


def main() -> int:
    args = parser().parse_args()
    try:
        found = measure(args)
    except (PegboardError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(found)))
    if args.json:
        args.json.write_text(json.dumps({**asdict(found), "checks": found.checks}, indent=2) + "\n", "utf-8")
    return 0 if all(fine for _, _, fine in found.checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
