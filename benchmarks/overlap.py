"""What the overlap loop hides of the host's work, over a device that takes as long as one says.

``python -m benchmarks.overlap [--device-ms 5] [--host-ms 2] [--steps 100] [--rounds 3]``: each step takes `device-ms`
on a device that seems to be beside the CPU (`TimelineQueue`; its model answers at once), and `host-ms` of work on the
scheduler's thread. In the normal loop both add up; the overlap loop should need the longer one only. Both run in turns,
in one process; the figure is the median time of a decode step over the device's time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.forward import ForwardBatch, ForwardOutput
from pegboard.core.interfaces.model_runner import ModelRunner, ModelRunnerContext
from pegboard.core.interfaces.sampling import SamplingBatch, SamplingParams
from pegboard.core.pipeline.executor import LocalExecutor
from pegboard.core.worker.worker import Worker
from tests.fakes.device_queue import TimelineQueue

LOOPS = ("normal", "overlap")
REQUESTS = 4
PROMPT = [3, 4, 5, 6]
TOKEN = 5


class AnswersAtOnce:
    """The part of a runner that a worker needs: all that takes time is the device's."""

    def __init__(self, ctx: ModelRunnerContext) -> None:
        self.ctx = ctx

    def execute(self, batch: ForwardBatch, sampling: SamplingBatch | None) -> ForwardOutput:
        return ForwardOutput(torch.full((0 if sampling is None else len(sampling),), TOKEN))


def engine_of(model: Path, loop: str, device: float, host: float) -> Engine:
    """Return an engine whose steps take `device` seconds there, and `host` seconds of the scheduler's thread here."""

    def work() -> None:
        until = time.perf_counter() + host
        while time.perf_counter() < until:
            pass

    engine = Engine.from_config(
        {
            "attention": {"use": "torch"},
            "runner": {"use": "layered"},
            "memory": {"max_total_tokens": 8192},
            "model": {"path": str(model), "dtype": "float32"},
            "scheduler": {"loop": loop},
        }
    )
    built = engine.built
    components, runner = built.scheduler.components, built.runner
    rows = components.memory.rows
    rows.mirrored = True  # a device has a table of its own
    instant = cast(ModelRunner, AnswersAtOnce(runner.ctx))
    worker = Worker(instant, runner.ctx.attention, built.pool, rows, TimelineQueue(device))
    components.executor.close()
    components.executor = LocalExecutor(worker.launch, worker.rerun, thread=loop == "overlap")
    built.scheduler.on_step = work
    return engine


def step_times(engine: Engine, steps: int) -> list[float]:
    """Return the seconds between the ends of decode steps of a few requests."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=steps + 8, ignore_eos=True)
    for _ in range(REQUESTS):
        engine.submit(GenerateRequest(prompt=PROMPT, sampling=sampling))
    ends = []
    while not engine.built.scheduler.idle:
        engine.poll()
        ends.append(time.perf_counter())
    # Not those of the prompts, nor the last ones.
    return [later - earlier for earlier, later in itertools.pairwise(ends[4:-4])]


def measure(device: float, host: float, steps: int, rounds: int) -> dict[str, float]:
    """Return the median step of each loop over the device's time."""
    found: dict[str, list[float]] = {loop: [] for loop in LOOPS}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = tiny_checkpoint(folder, "llama", num_hidden_layers=1)
        engines = {loop: stack.enter_context(engine_of(model, loop, device, host)) for loop in LOOPS}
        for _ in range(rounds):
            for loop, engine in engines.items():
                found[loop] += step_times(engine, steps)
    return {loop: statistics.median(times) / device for loop, times in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-ms", type=float, default=5.0)
    parser.add_argument("--host-ms", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    found = measure(given.device_ms / 1e3, given.host_ms / 1e3, given.steps, given.rounds)
    print(f"a step of {given.device_ms:g} ms on the device, with {given.host_ms:g} ms of the host's work:")
    for loop, ratio in found.items():
        print(f"{loop:8} {ratio * given.device_ms:6.2f} ms, {ratio:.3f} of the device's time")


if __name__ == "__main__":
    main()
