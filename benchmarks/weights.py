"""New weights beside the load at the start, and memory given back: seconds and resident memory.

    python -m benchmarks.weights [--model DIR] [--only dense packed transformers native] [--runs 5] [--rounds 20]

Each arrangement runs in a process of its own, on files that the system has in memory. Printed are medians of the
seconds in which weights are loaded at the start, and are replaced by those of a directory, while a request is
retracted: no step runs meanwhile. Then resident memory: at the height of an update, above that before it; what a
release gives back to the system, of the bytes of KV and of weights that it tells; and how far it moves over rounds of
an update, a release and a resume.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from pegboard.core.engine import build
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit.system.cache_dir import default_cache_dir

ARRANGEMENTS = {
    "dense": ("model.use=dense", "model.packed=off", "runner.use=layered"),
    "packed": ("model.use=dense", "runner.use=layered"),
    "transformers": ("model.use=transformers", "runner.use=layered"),
    "native": ("runner.use=cpu_native",),
}
TOKENS = 8192
"""KV in the pool: as many bytes as the demo model's weights take, about."""
MB = 2**20


def main() -> None:
    args = arguments()
    model = args.model or default_cache_dir() / "peers" / "model" / "smollm2-bf16"
    if not model.is_dir():
        raise SystemExit(f"{model} is not there: name a checkpoint, or run python -m benchmarks.peers setup")
    for name in args.only:
        process = multiprocessing.get_context("spawn").Process(
            target=measured, args=(name, model.resolve(), args.runs, args.rounds)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(ARRANGEMENTS), default=list(ARRANGEMENTS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args()


def measured(name: str, model: Path, runs: int, rounds: int) -> None:
    """Print what one arrangement does."""
    loads = timed_loads()
    words = [
        *(f"model.path={model}", "model.dtype=bfloat16", f"memory.max_total_tokens={TOKENS}"),
        *("weight_updates.enabled=true", f"weight_updates.directories=[{model.parent}]", *ARRANGEMENTS[name]),
    ]
    for _ in range(runs):
        with Engine.from_config({}, "examples/quickstart.yaml", overrides=words) as engine:
            answer(engine)
    with Engine.from_config({}, "examples/quickstart.yaml", overrides=words) as engine:
        before = answer(engine)
        found = [updated(engine, model) for _ in range(runs + 1)][1:]
        load, update = statistics.median(loads), statistics.median(seconds for seconds, _ in found)
        print(
            f"{name}: load {load:.2f} s, update {update:.2f} s ({update / load:.2f} of the load); above the weights "
            f"meanwhile {max(peak for _, peak in found) / MB:.0f} MB",
            flush=True,
        )
        use_all_kv(engine)
        for tag in ("kv_cache", "weights"):
            print(f"    {tag}: {released(engine, tag)}", flush=True)
            engine.control("resume_memory", tags=[tag])
            assert answer(engine) == before, "what is taken again serves the same tokens"
        sizes = [rounded(engine, model) for _ in range(rounds)]
        if sizes:
            print(f"    {rounds} rounds: {sizes[0] / MB:.0f} to {sizes[-1] / MB:.0f} MB resident", flush=True)
        assert answer(engine) == before


def timed_loads() -> list[float]:
    """Return a list to which each engine of this process adds the seconds in which it loads weights."""
    found: list[float] = []
    load = vars(build)["load_model"]

    def timed(*args: object) -> object:
        began = time.perf_counter()
        runner: object = load(*args)
        found.append(time.perf_counter() - began)
        return runner

    setattr(build, "load_model", timed)  # noqa: B010 (it is not among what the module exports)
    return found


def answer(engine: Engine) -> list[int]:
    sampling = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
    return engine.generate("The capital of France is", sampling).token_ids


def use_all_kv(engine: Engine) -> None:
    """Write to all pages of the pool: what was never written to takes no memory that could be given back."""
    draw = random.Random(0)
    prompts = [[draw.randrange(3, engine.info.vocab_size) for _ in range(480)] for _ in range(TOKENS // 512)]
    engine.flush_cache()
    engine.generate(prompts, SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True))


def updated(engine: Engine, model: Path) -> tuple[float, int]:
    """Return the seconds of an update while a request runs, and the bytes that are resident meanwhile beyond those of
    before.
    """
    sampling = SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True)
    rid = engine.submit(GenerateRequest(prompt="The capital of France is", sampling=sampling, stream=True))
    while not engine.poll():
        pass
    before = resident()
    with highest() as peak:
        began = time.perf_counter()
        engine.control("update_weights", path=str(model))
        seconds = time.perf_counter() - began
    while not any(chunk.rid == rid and chunk.finish_reason for chunk in engine.poll()):
        pass
    return seconds, peak() - before


def released(engine: Engine, tag: str) -> str:
    """Say what a release gives back."""
    before = resident()
    told = engine.control("release_memory", tags=[tag])["released_bytes"]
    assert isinstance(told, dict)
    back = before - resident()
    return f"{back / MB:.0f} of {told[tag] / MB:.0f} MB given back ({back / told[tag]:.2f})"


def rounded(engine: Engine, model: Path) -> int:
    """Return the bytes that are resident after an update, a release and a resume."""
    engine.control("update_weights", path=str(model))
    engine.control("release_memory")
    engine.control("resume_memory")
    answer(engine)
    return resident()


def resident() -> int:
    found: int = psutil.Process().memory_info().rss
    return found


@contextlib.contextmanager
def highest() -> Iterator[Callable[[], int]]:
    """Yield what tells the most bytes that have been resident since."""
    found, over = [resident()], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            found[0] = max(found[0], resident())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: found[0]
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    main()
