"""Both sides of rooms, with the gate keeper, over a bad network in virtual time."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from pegboard.conformance.properties import properties
from tests.plugins.disagg.machine import RoomMachine
from tests.plugins.disagg.walk import CALM, failures, walk
from tests.plugins.disagg.world import Setup, World


def test_a_request_goes_its_way() -> None:
    world = World()
    world.post(23)
    for _ in range(20):
        world.work()
        world.end_read(0, True)
    assert list(world.answers["prefill"].values()) == list(world.answers["decode"].values()) == ["length"]
    assert world.decode.made.stats()["rooms_arrived_total"] == 1
    world.check_settled()


SETUPS = {
    "fail": Setup(),
    "compute": Setup(on_loss="compute"),
    "tight": Setup(pages=(1, 4), memory=(40, 9), share=0.2),
    "same": Setup(pages=(16, 16), memory=(6, 6)),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_whatever_happens(setup: str) -> None:
    machine = type("Machine", (RoomMachine,), {"setup": SETUPS[setup]})
    run_state_machine_as_test(machine, settings=properties(10, 40))


@pytest.mark.parametrize("setup", SETUPS)
def test_long_walks(setup: str) -> None:
    """20,000 things happen, in all setups together."""
    worlds = [walk(seed, 500, SETUPS[setup]) for seed in range(10)]
    arrived = sum(world.decode.made.stats().get("rooms_arrived_total", 0) for world in worlds)
    assert arrived >= 20, "hardly anything went well, so hardly anything was tested"


@pytest.mark.parametrize("setup", SETUPS)
def test_nothing_fails_without_a_reason(setup: str) -> None:
    """Where the network works, retractions, short memory and late messages of other requests cost nothing but time."""
    for seed in range(4):
        assert not failures(walk(seed, 500, SETUPS[setup], weighted=CALM))


@pytest.mark.full
@pytest.mark.parametrize("setup", SETUPS)
def test_longer_walks(setup: str) -> None:
    for seed in range(1000, 1400):
        walk(seed, 500, SETUPS[setup])
