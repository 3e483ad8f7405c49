"""What the console costs the scheduler: without it, with it and no page open, and with pages open.

    python -m benchmarks.console

Counts instructions with valgrind's cachegrind, in about five minutes. They are the same in each run to about 0.1%,
which seconds are not. The scheduler is that of benchmarks/scheduler.py: 256 requests decode, 1,000 wait, and the model
answers at once. While pages are open, one question comes every 50 steps: two a second, where a step takes 10 ms. The
number of pages does not matter, since they share the question.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys

from benchmarks.scheduler import Bench
from pegboard.core.engine.view import SchedulerView
from pegboard.core.interfaces.messages import ControlRequest
from pegboard.core.registry.hooks import Hooks
from pegboard.plugins.console import plugin
from pegboard.plugins.console.actions import LOOK
from pegboard.plugins.console.hooks import Console

MODES = ("without", "closed", "open")
RUNNING, WAITING, LENGTH = 256, 1000, 512
EVERY = 50
"""Steps from one question to the next."""
BLOCKS = 4
"""Blocks of so many steps whose instructions are counted."""


def take(mode: str, blocks: int) -> None:
    """Fill a scheduler and take so many blocks of steps. Where a page is open, each begins with a question."""
    gc.disable()
    console = Console()
    committed = () if mode == "without" else (console.batch_committed,)
    room = RUNNING * (LENGTH + 16384) + 1_000_000
    bench = Bench(policy="fcfs", page_size=1, running=RUNNING, tokens=room, committed=committed)
    hooks = Hooks()
    hooks.add(console, plugin=plugin)
    hooks.call.engine_started(info=None, engine=SchedulerView(bench.scheduler, hooks))
    bench.fill(RUNNING, LENGTH)
    bench.submit(bench.prompts(WAITING, LENGTH))
    for block in range(blocks + 1):  # one more to warm up
        question = ControlRequest(call_id=1, action=LOOK, args={"since": max(0, block - 1) * EVERY})
        bench.step(*([question] if mode == "open" else []))
        for _ in range(EVERY - 1):
            bench.step()


def instructions(mode: str, blocks: int) -> int:
    """Return how many a process executes that takes so many blocks."""
    valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    command = [*valgrind, sys.executable, "-m", "benchmarks.console", "--take", mode, str(blocks)]
    env = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    (found,) = re.findall(r"I +refs: +([\d,]+)", done.stderr)
    return int(found.replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", nargs=2, metavar=("MODE", "BLOCKS"), help="take steps, and print nothing")
    args = parser.parse_args()
    if args.take:
        return take(args.take[0], int(args.take[1]))
    base = 0.0
    for mode in MODES:
        each = (instructions(mode, BLOCKS) - instructions(mode, 0)) / (BLOCKS * EVERY)
        base = base or each
        print(f"{mode:8} {each:12,.0f} instructions per step, {each / base - 1:+.2%}", flush=True)
    return None


if __name__ == "__main__":
    main()
