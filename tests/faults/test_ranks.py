"""Ranks that end or fall silent while a server answers, and ranks that have nothing to do for long."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import psutil
import pytest

from pegboard.conformance.servers import serving
from tests.e2e.reference import Comparison
from tests.faults.ranks import HOW, PATIENCE, PROMPTS, World, drawn, generate, make_world, ranks, run

pytestmark = pytest.mark.timeout(3600)

TIMEOUT = 2.0
IDLE = 12.0
"""Seconds without a request: six times what a rank may be silent."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("ranks"))


@pytest.mark.soak
def test_two_deaths(world: World, tmp_path: Path) -> None:
    """Of another rank, and of rank 0 in a forward pass: two of the eight of the next test, by themselves."""
    assert len(run(world, tmp_path, [("kill", 1, False), ("raise", 0, False)]).deaths) == 2


@pytest.mark.full
def test_each_kind_of_death_of_each_rank(world: World, tmp_path: Path) -> None:
    """One after another, each time during some request's answer, some while ranks start."""
    summary = run(world, tmp_path, drawn(2 * len(HOW), 2, seed=1))
    assert len(set(summary.deaths)) == 2 * len(HOW)


@pytest.mark.soak
@pytest.mark.parametrize(("tensor", "count"), [(2, 40), (4, 16)])
def test_many_deaths(world: World, tmp_path: Path, tensor: int, count: int) -> None:
    ranked = World(world.model, world.expected, tensor)
    assert len(run(ranked, tmp_path, drawn(count, tensor, seed=2)).deaths) == count


@pytest.mark.full
def test_idle_ranks_stay_and_rest(world: World, tmp_path: Path) -> None:
    """None is lost while there is nothing to compute, and waiting takes less than 1% of a core."""
    with serving(world.config(tmp_path, TIMEOUT)) as server, httpx.Client(base_url=server.address) as client:
        client.timeout = PATIENCE
        assert generate(client, PROMPTS[0]).status_code == 200
        before = ranks(server)
        used = sum(seconds_of(rank) for rank in before[1:])
        time.sleep(IDLE)
        assert sum(seconds_of(rank) for rank in before[1:]) - used < 0.01 * IDLE
        answer = generate(client, PROMPTS[1])
        assert answer.status_code == 200, answer.text
        comparison = Comparison()
        comparison.add(answer.json()["output_ids"], world.expected[1], "after the pause")
        comparison.finish()
        assert [rank.pid for rank in ranks(server)] == [rank.pid for rank in before]


def seconds_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
