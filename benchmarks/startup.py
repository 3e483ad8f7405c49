"""How long commands and starts take, and what a served demo model keeps resident.

    python benchmarks/startup.py [--runs 5] [--config examples/quickstart.yaml]

Wall seconds of `pegboard --help` and `pegboard plugins list` (medians), of a server from its start to its first
answer, with the model still to be converted (an empty cache in a temporary folder) and then with the converted one;
and the resident memory of all processes after an answer, and their seconds of CPU until then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import psutil
import yaml

from pegboard.conformance.servers import serving

MB = 2**20


def seconds(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([str(Path(sys.executable).with_name("pegboard")), *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def first_answer(config: Mapping[str, object], env: Mapping[str, str]) -> tuple[float, list[tuple[str, int, float]]]:
    """Return seconds from the start of a server to its first answer; then name, resident bytes and CPU seconds by
    process.
    """
    body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    start = time.perf_counter()
    with serving(config, env=env) as server:
        request = urllib.request.Request(f"{server.address}/generate", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
        took = time.perf_counter() - start
        api = psutil.Process(server.process.pid)
        processes = [("api", api), *((_name(one), one) for one in api.children(recursive=True))]
        return took, [(name, one.memory_info().rss, sum(one.cpu_times()[:4])) for name, one in processes]


def _name(process: psutil.Process) -> str:
    modules = [word for word in process.cmdline() if word.startswith("pegboard.")]
    return modules[0].rpartition(".")[2] if modules else process.name()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--config", default="examples/quickstart.yaml")
    args = parser.parse_args()
    for words in (["--help"], ["plugins", "list"]):
        times = [seconds(*words) for _ in range(args.runs)]
        name = " ".join(["pegboard", *words])
        print(f"{name:<24} median {statistics.median(times):.2f} s of {args.runs}, worst {max(times):.2f} s")
    config = yaml.safe_load(Path(args.config).read_text("utf-8"))
    with tempfile.TemporaryDirectory(prefix="pegboard-startup-") as cache:
        env = {**os.environ, "PEGBOARD_CACHE": cache}
        cold, _ = first_answer(config, env)
        warm = [first_answer(config, env) for _ in range(3)]
    median = statistics.median(took for took, _ in warm)
    print(f"start to first answer: {cold:.1f} s with conversion and compilation, median {median:.1f} s of 3 without")
    for name, resident, cpu in warm[-1][1]:
        print(f"    {name:<20} {resident / MB:5.0f} MB resident, {cpu:5.2f} s of CPU")


if __name__ == "__main__":
    main()
