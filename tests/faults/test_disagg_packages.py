"""Whole requests through the wheels of NIXL and Mooncake: run by `make transfer-packages`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from tests.faults.disagg_faults import play
from tests.faults.disagg_packages import many, of_libraries
from tests.faults.disagg_world import World

pytestmark = [pytest.mark.transfer_packages, pytest.mark.slow, pytest.mark.timeout(300)]

# By shared memory UCX reads on while a peer is stopped.
ENGINES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "nixl": ("nixl", {"ucx": {"TLS": "tcp"}, "timeout": 2.0}),
    "mooncake": ("mooncake.engine", {"timeout": 2.0}),
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    module, options = ENGINES[request.param]
    pytest.importorskip(module, exc_type=ImportError)
    return {"use": request.param, **options}


def in_a_world(
    tmp_path: Path, engine: Mapping[str, Any], act: Callable[[World], Awaitable[None]], layers: int = 2
) -> None:
    model = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=layers)

    async def run() -> None:
        async with World(model, engine) as world:
            await act(world)

    asyncio.run(run())


def test_answers_are_those_of_one_server(tmp_path: Path, engine: Mapping[str, Any]) -> None:
    """With so many layers that most of the KV is read by way of blocks; from both prefill servers."""
    in_a_world(tmp_path, {**engine, "timeout": 20.0, "listen_host": "0.0.0.0"}, many, layers=8)


def test_prefill_servers_that_are_stopped_and_killed(tmp_path: Path, engine: Mapping[str, Any]) -> None:
    async def act(world: World) -> None:
        rows = [await play(world, cell) for cell in of_libraries()]
        assert not [str(row) for row in rows if row.wrong]
        await many(world)

    in_a_world(tmp_path, engine, act)
