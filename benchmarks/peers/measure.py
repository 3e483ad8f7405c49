"""The comparison of servers: each in turn, the same workloads by the same load tool, some times over."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.processes import Running, ServerError, first_answer, free_port, running
from benchmarks.peers.servers import Subject, ours_command, vllm_command, vllm_variables
from benchmarks.peers.workloads import MODEL, RATE_SEARCH, WORKLOADS, Workload, search_arguments, search_seconds

START_S = 600.0
"""vLLM compiles when it starts for the first time."""
LOAD_S = 420.0
"""More than any workload or search takes on a machine that does nothing else."""
BUSY_PERCENT = 15.0
"""Of the machine, used by others before a measurement: then its figures are in doubt."""


class LoadError(Exception):
    """The load tool failed; the message has what it said."""


@dataclass
class Plan:
    """What is to be done."""

    subjects: Sequence[Subject]
    names: Sequence[str]
    """Of workloads; RATE_SEARCH among them, or not."""
    runs: int
    cache: Path
    model: Path
    logs: Path
    quick: bool = False
    say: Callable[[str], None] = print
    guesses: dict[str, float] = field(default_factory=dict)
    """The rates that servers bore in the run before."""

    def workloads(self) -> list[Workload]:
        chosen = [one for one in WORKLOADS if one.name in self.names]
        return [one.shorter() for one in chosen] if self.quick else chosen

    def seconds(self) -> float:
        """About how long all of it takes."""
        return self.runs * sum(
            one.start_s + sum(estimate(w, one) + 2 for w in self.workloads()) + self._search(one)
            for one in self.subjects
        )

    def _search(self, subject: Subject) -> float:
        return search_seconds(subject.guess, quick=self.quick) if RATE_SEARCH in self.names else 0.0


def estimate(workload: Workload, subject: Subject) -> float:
    """Return seconds that a workload takes, about. A token of a prompt costs a tenth of one of an answer."""
    if workload.rate is not None:
        return workload.prompts / workload.rate + 2
    streams = workload.concurrency or 1
    pace = subject.pace[0 if streams < 4 else 1 if streams < 16 else 2]
    tokens = workload.output_len + workload.input_len / 10
    return workload.prompts * tokens / pace


def machine() -> dict[str, Any]:
    """Return what it runs on, for the record."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
        else:
            name = platform.processor()
        return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "memory_bytes": psutil.virtual_memory().total}
    return {"cpu": platform.processor(), "cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total}


def compare(plan: Plan, save: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Return every subject in turn, `plan.runs` times: A B A B A B. One record per start of a server; `save` gets all
    so far after each, so that an end in between loses little.
    """
    found: list[dict[str, Any]] = []
    for run in range(plan.runs):
        for subject in plan.subjects:
            plan.say(f"-- run {run + 1} of {plan.runs}: {subject.name}")
            record: dict[str, Any] = {"run": run, "subject": subject.name, "workloads": {}}
            found.append(record)
            try:
                _one(plan, subject, run, record)
            except ServerError as error:
                record["error"] = str(error)
                plan.say(f"   {error}")
            finally:
                save(found)
    return found


def _one(plan: Plan, subject: Subject, run: int, record: dict[str, Any]) -> None:
    record["busy_percent"] = busy = psutil.cpu_percent(interval=1.0)
    if busy > BUSY_PERCENT:
        plan.say(f"   others use {busy:.0f}% of this machine: absolute figures are in doubt")
    with started(plan, subject, run) as server:
        record["start_s"] = first_answer(server, MODEL, START_S)
        plan.say(f"   first answer after {record['start_s']:.1f} s")
        for number, workload in enumerate(plan.workloads()):
            server.check()
            median = measured(plan, server, workload, seed=1000 * (run + 1) + number, record=record)
            record["workloads"][workload.name] = median
            if median is not None:
                plan.say(f"   {workload.title}: {workload.value(median):.1f} {workload.unit}")
        record["resident_bytes"] = server.resident()
        plan.say(f"   {record['resident_bytes'] / 2**20:.0f} MB resident")
        if RATE_SEARCH in plan.names:
            record[RATE_SEARCH] = _search(plan, subject, server, run, record)
            plan.say(f"   highest rate: {record[RATE_SEARCH]} requests/s")


@contextlib.contextmanager
def started(plan: Plan, subject: Subject, run: int) -> Iterator[Running]:
    """Run a server of this subject until the block ends."""
    port = free_port()
    log = plan.logs / f"{subject.name}-{run}.log"
    if subject.ours:
        command = ours_command(subject, plan.model, port, plan.logs / f"{subject.name}.json")
        env = dict(subject.env)
    else:
        command = vllm_command(subject, plan.cache, plan.model, port)
        env = {**vllm_variables(plan.cache), **subject.env}
    with running(subject.name, command, f"http://127.0.0.1:{port}", log, env=env) as server:
        yield server


def measured(
    plan: Plan, server: Running, workload: Workload, *, seed: int, record: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the load tool's medians, with the processor's seconds of the server; None, and a note, where it failed."""
    before, began = server.cpu_seconds(), time.perf_counter()
    try:
        median: dict[str, Any] = bench(lambda file: workload.arguments(server.url, seed, file))["median"]
    except LoadError as error:
        record.setdefault("failures", []).append(f"{workload.name}: {error}")
        plan.say(f"   {workload.title}: {error}")
        return None
    median["server_cpu_s"] = server.cpu_seconds() - before
    median["wall_s"] = time.perf_counter() - began
    return median


def bench(arguments: Callable[[str], list[str]]) -> dict[str, Any]:
    """Return one run of `pegboard bench serve`, what it writes. `arguments` is given the file's name. Raises
    LoadError.
    """
    with tempfile.TemporaryDirectory(prefix="pegboard-peers-") as folder:
        file = Path(folder, "load.json")
        command = [sys.executable, "-m", "pegboard", "bench", "serve", *arguments(str(file))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOAD_S)
        except subprocess.TimeoutExpired:
            raise LoadError(f"the load tool was not done after {LOAD_S:g} s; is this machine busy?") from None
        found: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        # A search that has tried rates and kept none fails, and yet has an answer.
        if done.returncode and not found.get("trials"):
            said = "\n".join((done.stderr or done.stdout).splitlines()[-12:])
            raise LoadError(f"the load tool ended with exit code {done.returncode}: {said}")
        return found


def _search(plan: Plan, subject: Subject, server: Running, run: int, record: dict[str, Any]) -> float | None:
    """Return the highest rate that it bears, beginning where it was found before; 0 where it bears none."""
    guess = plan.guesses.get(subject.name) or subject.guess
    seed = 1000 * (run + 1) + 100
    try:
        found = bench(lambda file: search_arguments(server.url, seed, guess, file, quick=plan.quick))
    except LoadError as error:
        record.setdefault("failures", []).append(f"{RATE_SEARCH}: {error}")
        return None
    record["trials"] = [
        {"rate": one["rate"], "why": one["why"], "ttft_ms": one["figures"].get("ttft_ms")} for one in found["trials"][0]
    ]
    rate: float = found["rate"] or 0.0
    plan.guesses[subject.name] = rate
    return rate
