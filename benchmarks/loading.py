"""How long loading weights takes, and how much memory at its height, against another checkout.

    python -m benchmarks.loading [--against ../before] [--rounds 5] [--model DIR]

Each round starts a process per checkout and arrangement, in turn, each round the other way round. A process builds the
engine twice on files that the system has in memory, and tells of the second time: seconds, seconds of CPU, and the most
memory that it had of its own, above that of before and less the weights. Files that are mapped do not count, as the
system can drop them. By default the model is a random one of 0.28 billion parameters in bfloat16, whose largest matrix
(words) has 66 MB. Linux only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.parallel import write_model
from benchmarks.peers.processes import checkout_python

ARRANGEMENTS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "dense": {"model": {"use": "dense", "packed": "off"}, "runner": {"use": "layered"}},
    "transformers": {"model": {"use": "transformers"}, "runner": {"use": "layered"}},
    "native": {"runner": {"use": "cpu_native"}},
}
MB = 2**20

# Given to any checkout's Python: it may use what is public there alone.
CHILD = """
import ctypes, gc, json, sys, threading, time
from pegboard import Engine, compose

def own():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))

def watch():
    while not over.wait(0.002):
        most[0] = max(most[0], own())

def build():
    return Engine(compose(data=json.loads(sys.argv[1]), env={}))

build().close()
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before, over = own(), threading.Event()
most = [before]
watcher = threading.Thread(target=watch)
watcher.start()
began, cpu = time.perf_counter(), time.process_time()
engine = build()
found = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
over.set()
watcher.join()
print(json.dumps({**found, "bytes": most[0] - before}))
engine.close()
"""


def loaded(python: Path, model: Path, arrangement: Mapping[str, Mapping[str, object]]) -> dict[str, float]:
    """Return what a process tells. Raises CalledProcessError."""
    model_section = {"path": str(model), "dtype": "bfloat16", **arrangement.get("model", {})}
    memory = {"max_total_tokens": 4096}
    config = {"memory": memory, "log_level": "error", **arrangement, "model": model_section}
    with tempfile.TemporaryDirectory() as elsewhere:  # where no folder shadows the checkout's packages
        command = [str(python), "-c", CHILD, json.dumps(config)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=elsewhere, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout with a .venv")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory in bfloat16")
    parser.add_argument("--only", nargs="+", choices=list(ARRANGEMENTS), default=list(ARRANGEMENTS))
    args = parser.parse_args()
    pythons = {"ours": Path(sys.executable)}
    if args.against:
        pythons = {"before": checkout_python(args.against), **pythons}
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model
        if model is None:
            model = Path(scratch)
            write_model(model, weights=True)
        for name in args.only:
            show(name, measured(pythons, model.resolve(), name, args.rounds), model)


def measured(pythons: Mapping[str, Path], model: Path, name: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return what each checkout's processes tell, one after the other."""
    found: dict[str, list[dict[str, float]]] = {who: [] for who in pythons}
    for number in range(rounds):
        for who in list(pythons)[:: 1 if number % 2 else -1]:
            found[who].append(loaded(pythons[who], model, ARRANGEMENTS[name]))
    return found


def show(name: str, found: Mapping[str, list[dict[str, float]]], model: Path) -> None:
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    for who, runs in found.items():
        seconds, cpu, most = (statistics.median(run[key] for run in runs) for key in ("seconds", "cpu", "bytes"))
        above = (most - size) / MB
        print(f"{name}, {who}: {seconds:.2f} s, {cpu:.2f} s of CPU, {above:+.0f} MB at the height", flush=True)
    if "before" in found:
        pairs = list(zip(found["before"], found["ours"], strict=True))
        for key in ("seconds", "cpu"):
            ratios = sorted(ours[key] / before[key] for before, ours in pairs)
            middle = statistics.median(ratios)
            print(f"    {key}, ours to before: {middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)


if __name__ == "__main__":
    main()
