"""Several ranks, as threads, answer as one process does: greedy and drawn tokens, penalties, logprobs, stops,
in both loops, with chunks, mixed batches, caches, and a pool so small that requests are retracted.
"""

from __future__ import annotations

from typing import Any

import pytest

from pegboard.core.engine.engine import Engine
from tests.e2e.test_scheduling_matrix import OFTEN, ROOMY, TIGHT, Cell, World, ask, check, world
from tests.parallel.rank_threads import in_threads

__all__ = ["world"]

CELLS = {
    "normal": Cell("lof", "normal", 32, True, 16, TIGHT, "radix"),
    "overlap": Cell("lof", "overlap", 32, False, 1, TIGHT, "radix"),
    "whole": Cell("fcfs", "overlap", 0, False, 16, ROOMY, "block"),
    "mixed": Cell("fcfs", "overlap", 32, True, 1, ROOMY, "radix"),
}


def run(config: dict[str, Any], world: World, tensor: int, pipeline: int) -> dict[str, Any]:
    with Engine(in_threads(config, tensor, pipeline=pipeline)) as engine:
        outputs = ask(engine, world.cases)
        stats = engine.stats()
        memory = engine.built.scheduler.components.memory
        assert memory.idle_error() is None
    check(world.cases, outputs)
    assert stats["book_errors"] == stats["failed_batches"] == stats["aborted"] == stats["plugin_failures"] == 0
    return stats


@pytest.mark.full
@pytest.mark.parametrize(
    ("tensor", "pipeline", "cell"),
    [
        *((2, 1, cell) for cell in CELLS),
        *((1, 2, cell) for cell in CELLS),
        (4, 1, "normal"),
        (2, 2, "overlap"),
    ],
)
def test_ranks_answer_as_one_process_does(tensor: int, pipeline: int, cell: str, world: World) -> None:
    """The reference ran each request alone. With 4 ranks each KV head of the 2 is on two of them. With two sections and
    the overlap loop there are two lanes.
    """
    settings = CELLS[cell]
    stats = run(settings.config(world), world, tensor, pipeline)
    if settings.tokens == TIGHT:
        assert stats["retractions"] - stats["preemptions"] >= OFTEN[settings.page_size]
