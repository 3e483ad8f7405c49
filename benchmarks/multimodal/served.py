"""Servers under test. One that is watched says how late its API process's event loop was, and how long steps took."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.processes import Running, free_port, running, wait_healthy
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.core.interfaces.plugin import Plugin

if TYPE_CHECKING:
    from fastapi import FastAPI

    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.engine.build import BuiltScheduler
    from pegboard.core.pipeline.counters import Counters

ROOT = Path(__file__).resolve().parents[2]
LOOP, STEPS = "PEGBOARD_BENCH_LOOP", "PEGBOARD_BENCH_STEPS"
"""Variables of the environment that name the files for beats of the event loop and for steps."""
HERE = "benchmarks.multimodal.served"
BEAT_S = 0.002
START_S = 180.0
MODEL = "bench"


# ---- in the server's processes --------------------------------------------------------------------------------------


class LoopWatch:
    """A hook of the API process: beats every two milliseconds, and notes beats that are late by as much."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    @hookimpl
    def register_routes(self, app: FastAPI) -> None:
        self._task = asyncio.get_running_loop().create_task(self._beat(Path(os.environ[LOOP])))

    @staticmethod
    async def _beat(file: Path) -> None:
        """Write lines of a time, by how much the beat was late, and how long this thread has computed since the beat
        before, in seconds.
        """
        with file.open("a", buffering=1, encoding="utf-8") as out:
            while True:
                due, computed = time.perf_counter() + BEAT_S, time.thread_time()
                await asyncio.sleep(BEAT_S)
                now = time.perf_counter()
                if now - due >= BEAT_S:
                    out.write(f"{now} {now - due} {time.thread_time() - computed}\n")


plugin = Plugin(name="bench_loop_watch", version="0", hooks=(f"{HERE}:LoopWatch",))


class StepLog:
    """Notes how long each step took, and how many tokens it brought. For the normal loop, step by step."""

    def __init__(
        self, counters: Counters, figures: Callable[[], Mapping[str, float]], write: Callable[[str], object]
    ) -> None:
        self._counters = counters
        self._figures = figures
        self._write = write
        self._before = self._now()

    def __call__(self) -> None:
        before, self._before = self._before, self._now()
        encodes, prefills, decodes, tokens, encoding, computing = (
            after - earlier for after, earlier in zip(self._before, before, strict=True)
        )
        kind = "piece" if encodes else "chunk" if prefills else "decode" if decodes else ""
        if kind:
            self._write(f"{time.perf_counter()} {kind} {encoding if encodes else computing} {tokens:.0f}\n")

    def _now(self) -> tuple[float, ...]:
        found, told = self._counters, self._figures()
        computing = found.schedule_time + found.forward_time + found.results_time
        steps = told["encode_steps"], found.prefill_steps, found.decode_steps
        return *steps, found.generated_tokens, told["encode_time"], computing


def build(resolved: ResolvedConfig, scratch: Path) -> BuiltScheduler:
    """Return a scheduler that writes down its steps: for the scheduler process."""
    from pegboard.core.engine.build import build_scheduler

    built = build_scheduler(resolved, scratch)
    out = Path(os.environ[STEPS]).open("a", buffering=1, encoding="utf-8")  # noqa: SIM115 - until the process ends
    figures = built.scheduler.components.points.reports.figures
    built.scheduler.on_step = StepLog(built.scheduler.counters, figures, out.write)
    return built


def serve_watched(config: str) -> None:
    """`pegboard serve` with both."""
    from pegboard.core.config.compose import compose
    from pegboard.core.server.serve import serve

    serve(compose(data=json.loads(config)), builder=f"{HERE}:build")


# ---- in the benchmark -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Late:
    """A beat of the event loop that was late. Times in seconds, `at` of time.perf_counter()."""

    at: float
    late: float
    computing: float


@dataclass(frozen=True)
class Step:
    """A step that ended at `at`: "chunk", "piece" or "decode". A chunk may have decodes in its batch, whose tokens
    count.
    """

    at: float
    kind: str
    seconds: float
    tokens: int = 0


@dataclass(frozen=True)
class Watched:
    """What a server wrote down, in [start, stop) of time.perf_counter(), which all processes have in common."""

    loop: Path
    steps: Path

    def late(self, start: float, stop: float) -> list[Late]:
        rows = ([float(one) for one in line] for line in _lines(self.loop, 3))
        return [Late(*row) for row in rows if start <= row[0] < stop]

    def in_order(self, start: float, stop: float) -> list[Step]:
        """Return the steps that ended in that time."""
        found = [
            Step(float(at), kind, float(seconds), int(tokens)) for at, kind, seconds, tokens in _lines(self.steps, 4)
        ]
        return [one for one in found if start <= one.at < stop]


def _lines(file: Path, fields: int) -> Iterator[list[str]]:
    """Yield the fields of each whole line: the last one may be under way."""
    if file.exists():
        for line in file.read_text("utf-8").splitlines(keepends=True):
            if line.endswith("\n") and len(line.split()) == fields:
                yield line.split()


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    name: str
    process: Running
    watched: Watched

    @property
    def url(self) -> str:
        return self.process.url


@contextlib.contextmanager
def serving(
    name: str,
    model: Path,
    *,
    config: Mapping[str, Any] | None = None,
    python: str = sys.executable,
    watched: bool = False,
) -> Iterator[Server]:
    """Run a server of this model until the block ends; of the checkout that this Python belongs to."""
    with tempfile.TemporaryDirectory(prefix="pegboard-multimodal-") as folder:
        port = free_port()
        data = {
            "model": {"path": str(model), "dtype": "bfloat16", "served_name": MODEL},
            "server": {"host": "127.0.0.1", "port": port},
            **(config or {}),
        }
        file, seen = Path(folder, "config.json"), Watched(Path(folder, "loop"), Path(folder, "steps"))
        file.write_text(json.dumps(data), "utf-8")
        # -P: the folder that this runs in is a checkout, and perhaps not the one that is meant.
        command = [python, "-P", "-m", "pegboard", "serve", str(file)]
        env = {LOOP: str(seen.loop), STEPS: str(seen.steps)}
        if watched:
            command = [python, "-P", "-m", "benchmarks.multimodal", "--serve", json.dumps(data)]
            env["PYTHONPATH"] = os.pathsep.join((str(ROOT), folder))
            _install(Path(folder))
        with running(name, command, f"http://127.0.0.1:{port}", Path(folder, "log"), env=env) as process:
            wait_healthy(process, START_S, "/ready")
            try:
                yield Server(name, process, seen)
            except Exception:
                print(f"the end of the log of the server {name!r}:\n{process.end_of_log()}", file=sys.stderr)
                raise


def _install(folder: Path) -> None:
    """Have Python find the plugin of this file, with this folder in its path."""
    about = folder / "bench_loop_watch-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-loop-watch\nVersion: 0\n", "utf-8")
    (about / "entry_points.txt").write_text(f"[pegboard]\nbench_loop_watch = {HERE}:plugin\n", "utf-8")
