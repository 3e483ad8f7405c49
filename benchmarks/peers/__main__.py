"""Pegboard against vLLM and llama.cpp on this machine, with the same load tool.

    python -m benchmarks.peers setup                 # installs both peers, each in an environment of its own
    python -m benchmarks.peers run                   # vLLM and ours in turn, three times: 25 minutes
    python -m benchmarks.peers run --vllm-variant plain:LD_PRELOAD=,VLLM_CPU_OMP_THREADS_BIND=auto    # as it comes, too
    python -m benchmarks.peers run --peers llama     # one stream against llama.cpp: 6 minutes
    python -m benchmarks.peers run --peers llama --variant int8:runner.use=cpu_native,runner.weights=int8
    python -m benchmarks.peers run --peers --against ../before    # a change: another checkout and this one in turn
    python -m benchmarks.peers pair --against ../before --rounds 20    # both up at once, in short turns
    python -m benchmarks.peers pair --only streams-32 --reading page:/console/events    # what an open page costs
    python -m benchmarks.peers report FILE           # the tables once more

Servers are measured by `pegboard bench serve`, with the same prompts, in bf16 and with prefix caching, each started
anew for each repetition. Ratios are of medians over the repetitions of one run; absolute figures are those of this
machine, and of what else runs on it. Results are written after each step, so that an end in between keeps them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import environments, measure, models, one_stream, paired, report
from benchmarks.peers.environments import SetupError
from benchmarks.peers.processes import ServerError, checkout_python
from benchmarks.peers.servers import BEFORE, OURS, VLLM, Subject, variant, vllm_variant, with_reader
from benchmarks.peers.workloads import NAMES, WORKLOADS
from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.system.cache_dir import default_cache_dir

PEERS = ("vllm", "llama")
STREAMS = tuple(load.name for load in WORKLOADS if load.concurrency and load.output_len == load.input_len)
"""Workloads that are measured in pairs."""
LLAMA_RUN_S = 22.0
"""About what one lane of one stream takes once."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument(
        "--cache", type=Path, default=default_cache_dir() / "peers", help="folder for environments, models and results"
    )
    setup = steps.add_parser("setup", parents=[both], help="install the peers")
    setup.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    setup.add_argument("--cmake-args", default=environments.CMAKE_ARGS, help="for the compilation of llama.cpp")
    run = steps.add_parser("run", parents=[both], help="measure")
    run.add_argument("--peers", nargs="*", choices=PEERS, default=["vllm"], help="none: ours alone")
    run.add_argument("--against", type=Path, metavar="PATH", help="ours of another checkout with a .venv, in turn, too")
    run.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="WORKLOAD", help=", ".join(NAMES))
    run.add_argument("--runs", type=int, default=3, help="repetitions of everything")
    run.add_argument("--quick", action="store_true", help="few requests, to see that it works; figures mean little")
    run.add_argument(
        "--variant", action="append", default=[], metavar="NAME:KEY=VALUE,...", help="ours once more, set otherwise"
    )
    run.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="for ours")
    run.add_argument("--vllm-option", action="append", default=[], metavar="WORD", help="a word for `vllm serve`")
    run.add_argument(
        "--vllm-variant", action="append", default=[], metavar="NAME:VARIABLE=VALUE,...", help="vLLM once more"
    )
    run.add_argument("--vllm-env", action="append", default=[], metavar="NAME=VALUE", help="for `vllm serve`")
    run.add_argument("--model", type=Path, help="a Hugging Face directory in bf16, in place of the demo model")
    run.add_argument("--results", type=Path, help="where the JSON goes; the tables go beside it, as .md")
    pair = steps.add_parser("pair", parents=[both], help="two or more of ours that are up at once and take turns")
    pair.add_argument("--against", type=Path, metavar="PATH", help="another checkout with a .venv")
    pair.add_argument("--only", nargs="+", choices=STREAMS, default=list(STREAMS), metavar="WORKLOAD")
    pair.add_argument("--rounds", type=int, default=20)
    pair.add_argument("--variant", action="append", default=[], metavar="NAME:KEY=VALUE,...", help="set otherwise")
    pair.add_argument("--reading", action="append", default=[], metavar="NAME:/PATH", help="while a stream is read")
    pair.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE", help="for all")
    pair.add_argument("--model", type=Path, help="a Hugging Face directory in bf16, in place of the demo model")
    pair.add_argument("--results", type=Path, help="where the JSON goes")
    again = steps.add_parser("report", help="print the tables of a run")
    again.add_argument("file", type=Path)
    found = parser.parse_args(words)
    if found.step == "run":
        if found.runs < 1:
            parser.error("--runs must be at least 1")
        found.reading = []
    if found.step == "pair":
        if found.rounds < 1 or not (found.against or found.variant or found.reading):
            parser.error("pair: --rounds must be at least 1, and there must be an --against, --variant or --reading")
        found.peers, found.runs, found.quick = [], 1, False
    return found


def say(text: str) -> None:
    print(text, flush=True)


def setup(args: argparse.Namespace) -> None:
    if "llama" in args.peers:
        environment = environments.llama_environment(args.cache, args.cmake_args)
        environments.install(environment, lambda one: environments.llama_steps(one, args.cmake_args), say)
        say(f"model: {models.bf16_gguf(args.cache, environment.python)}")
    if "vllm" in args.peers:
        environments.install(environments.vllm_environment(args.cache), environments.vllm_steps, say)
        say(f"model: {models.bf16_directory(args.cache)}")


class Results:
    """The file that grows with every step."""

    def __init__(self, file: Path, args: argparse.Namespace) -> None:
        self.file = file
        self.data: dict[str, Any] = {
            "format": 1,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": " ".join(["python -m benchmarks.peers", *args.words]),
            "machine": measure.machine(),
            "versions": {"vllm": f"vLLM-CPU {environments.VLLM}", "llama": f"llama-cpp-python {environments.LLAMA}"},
            "runs": args.runs,
            "quick": args.quick,
        }
        file.parent.mkdir(parents=True, exist_ok=True)

    def save_pairs(self, records: list[dict[str, Any]]) -> None:
        self.data["pairs"] = records
        self.file.write_text(json.dumps(self.data, indent=1) + "\n", "utf-8")

    def save(self, key: str, records: list[dict[str, Any]]) -> None:
        self.data[key] = records
        self.file.write_text(json.dumps(self.data, indent=1) + "\n", "utf-8")
        self.file.with_suffix(".md").write_text(report.render(self.data), "utf-8")


def _subjects(args: argparse.Namespace) -> list[Subject]:
    found = []
    if "vllm" in args.peers:
        environment = environments.vllm_environment(args.cache)
        if not environment.ready:
            raise SetupError(f"vLLM is not installed in {environment.root}: python -m benchmarks.peers setup")
        env = dict(one.split("=", 1) for one in args.vllm_env)
        for one in (VLLM, *map(vllm_variant, args.vllm_variant)):
            found.append(dataclasses.replace(one, options=tuple(args.vllm_option), env={**env, **one.env}))
    if args.against:
        python = str(checkout_python(args.against))
        found.append(dataclasses.replace(OURS, name=BEFORE, overrides=tuple(args.overrides), python=python))
    found.append(dataclasses.replace(OURS, overrides=tuple(args.overrides)))
    for ours in (*map(variant, args.variant), *map(with_reader, args.reading)):
        found.append(dataclasses.replace(ours, overrides=(*args.overrides, *ours.overrides)))
    return found


def run(args: argparse.Namespace) -> None:
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    file = args.results or args.cache / "results" / f"{stamp}.json"
    model = args.model or models.bf16_directory(args.cache)
    results = Results(file, args)
    lanes: list[one_stream.Lane] = []
    if "llama" in args.peers:
        environment = environments.llama_environment(args.cache)
        if not environment.python.exists():
            raise SetupError(f"llama.cpp is not installed in {environment.root}: python -m benchmarks.peers setup")
        variants = [(one.name, one.overrides) for one in map(variant, args.variant)]
        gguf = models.bf16_gguf(args.cache, environment.python)
        lanes = one_stream.lanes(model, gguf, models.demo_gguf(), environment.python, variants, args.quick)
    plan = None
    if "vllm" in args.peers or not args.peers:
        logs = args.cache / "logs" / stamp
        logs.mkdir(parents=True, exist_ok=True)
        plan = measure.Plan(_subjects(args), args.only, args.runs, args.cache, model, logs, args.quick, say)
    seconds = (plan.seconds() if plan else 0.0) + args.runs * len(lanes) * LLAMA_RUN_S * (0.4 if args.quick else 1)
    end = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
    say(f"about {seconds / 60:.0f} minutes, until {end:%H:%M}; results: {file}")
    if lanes:
        one_stream.compare(lanes, args.runs, say, lambda records: results.save("one_stream", records))
    if plan:
        say(f"logs of the servers: {plan.logs}")
        measure.compare(plan, lambda records: results.save("servers", records))
    say("\n" + report.render(results.data))
    say(f"{file}\n{file.with_suffix('.md')}")


def pair(args: argparse.Namespace) -> None:
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    file = args.results or args.cache / "results" / f"{stamp}-pairs.json"
    logs = args.cache / "logs" / stamp
    logs.mkdir(parents=True, exist_ok=True)
    model = args.model or models.bf16_directory(args.cache)
    results = Results(file, args)
    plan = measure.Plan(_subjects(args), args.only, 1, args.cache, model, logs, say=say)
    seconds = (args.rounds + 1) * len(args.only) * paired.ROUND_S * len(plan.subjects) / 2
    end = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
    say(f"about {seconds / 60:.0f} minutes, until {end:%H:%M}; results: {file}; logs of the servers: {logs}")
    found = paired.compare(plan, args.rounds, results.save_pairs)
    say("\n" + paired.render(found, plan.subjects[0].name))


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    args = arguments(words)
    args.words = list(words)
    # Ended from outside, it ends its servers as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if args.step == "report":
            say(report.render(json.loads(args.file.read_text("utf-8"))))
        else:
            {"setup": setup, "run": run, "pair": pair}[args.step](args)
    except KeyboardInterrupt:
        say("stopped; servers are ended, and what was measured is written")
        return 130
    except (SetupError, ServerError, measure.LoadError, PegboardError, OSError, ValueError) as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
