"""Break a prefill or a decode server, the network, or the clients, in each state that a request of both can be in.

    python -m tests.faults.disagg_faults

Each cell brings a request into a state, breaks something, and wants to see: both servers answer with what
docs/disaggregation.md says, within the bound that the options state; others are answered rightly meanwhile, through
another prefill server, or by one server alone; 15 s later at most nothing is left on the servers that live; and a
request of both is answered again once everything is mended. Then a storm: many requests, of which some are left by
their clients, while first one server's scheduler is killed and then the other one's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pegboard.conformance.checkpoints import tiny_checkpoint
from tests.faults.disagg_cells import LEFT, OK, WAITED, Cell, of_clients, of_decode, of_loss, of_prefill, of_refusals
from tests.faults.disagg_world import DECODE, PREFILL, Sent, World, Wrong

SLACK = 4.0
"""Seconds that a busy machine may take beyond a bound."""
CLIENTS = 16
ABORTS = 0.3
BACK_OFF = 1.0
"""Seconds that a client waits after a failure."""
HEAD = f"{'cell':<44} {'prefill':<22} {'decode':<24} {'s':>5} {'most':>5} {'empty':>5}"


@dataclass
class Row:
    """What became of a cell: answers, seconds until the last one, how many there may be, and until nothing was left."""

    cell: str
    prefill: str = ""
    decode: str = ""
    seconds: float = 0.0
    within: float = 0.0
    empty: float = 0.0
    wrong: str = ""

    def __str__(self) -> str:
        told = f"{self.cell:<44} {self.prefill:<22} {self.decode:<24} {self.seconds:5.1f} {self.within:5.1f}"
        return f"{told} {self.empty:5.1f}  {self.wrong or 'right'}"


def others(world: World, cell: Cell) -> list[Sent]:
    """Ask what has nothing to do with a cell."""
    if cell.victim == DECODE:
        return [world.plain(world.prefill, prompt) for prompt in world.short[:4]]
    pairs = [world.send(prompt, over=world.spare) for prompt in world.short[:4]]
    return [*pairs, *(world.plain(world.decode, prompt) for prompt in world.short[4:6])]


async def play(world: World, cell: Cell) -> Row:
    """Play a cell, and mend everything."""
    row = Row(str(cell), within=cell.within)
    try:
        await _break(world, cell, row)
    except Wrong as wrong:
        row.wrong = str(wrong)
    try:
        await world.mend()
    except Wrong as wrong:
        row.wrong = row.wrong or str(wrong)
    return row


async def _break(world: World, cell: Cell, row: Row) -> None:
    sent = await cell.reach(world)
    begun = time.monotonic()
    bystanders = others(world, cell)
    await cell.play(world, sent)
    there, here = [await sent.answer(side) for side in (PREFILL, DECODE)]
    row.prefill, row.decode = str(there), str(here)
    row.seconds = max(0.0, there.at - begun, here.at - begun)
    if there.status not in cell.prefill or here.status not in cell.decode:
        raise Wrong(f"{cell.prefill} and {cell.decode} were to be expected")
    if row.seconds > cell.within + SLACK:
        raise Wrong("that is too late")
    for number, one in enumerate(bystanders):
        for side in one.tasks:
            if (answer := await one.answer(side)).status != OK:
                raise Wrong(f"another request, number {number}, gets {answer} from {side}")
    row.empty = await world.empties(since=max(there.at, here.at, begun))


class Storm:
    """Requests of both servers, from CLIENTS clients, of which some leave."""

    def __init__(self, world: World, requests: int, seed: int) -> None:
        self.world = world
        self.chance = random.Random(seed)
        self.numbers = iter(range(requests))
        self.kills = {requests // 3: world.prefill, 2 * requests // 3: world.decode}
        self.found = Counter[str]()
        self.slowest = 0.0

    async def run(self) -> Row:
        row = Row("storm")
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(CLIENTS):
                    group.create_task(self._client())
            row.empty = await self.world.empties(since=time.monotonic())
            await self.world.mend()
        except* Wrong as wrong:
            row.wrong = f"{wrong.exceptions[0]}\n{await self.world.told()}"
        row.seconds, row.within = self.slowest, WAITED
        row.cell = f"storm: {', '.join(f'{count} {what}' for what, count in self.found.most_common())}"
        return row

    async def _client(self) -> None:
        for number in self.numbers:
            victim = self.kills.get(number)
            if victim is not None:
                victim.kill_scheduler()
            await self._one(number)

    async def _one(self, number: int) -> None:
        begun = time.monotonic()
        sent = self.world.send(self.world.long if number % 5 == 0 else self.chance.choice(self.world.short))
        if self.chance.random() < ABORTS:
            await asyncio.sleep(self.chance.choice((0.0, 0.02, 0.1, 0.4)) * self.chance.random())
            sent.leave(*self.chance.choice(((PREFILL,), (DECODE,), (PREFILL, DECODE))))
            self.found["were left by clients"] += 1
        there, here = [await sent.answer(side) for side in (PREFILL, DECODE)]
        if here.status != LEFT:
            self.found[f"got {here}"] += 1
        took = max(there.at, here.at) - begun
        self.slowest = max(self.slowest, took)
        if took > WAITED + SLACK:
            raise Wrong(f"request {number} is answered after {took:.1f} s: {there}, {here}")
        if here.status not in (OK, LEFT):
            await asyncio.sleep(BACK_OFF)


async def run(
    model: Path, cells: Iterable[Cell], *, storm: int = 0, seed: int = 0, **decode: Any
) -> AsyncIterator[Row]:
    """Play cells, and a storm of so many requests; `decode` are options of the decode server's gate."""
    async with World(model, **decode) as world:
        for cell in cells:
            yield await play(world, cell)
        if storm:
            yield await Storm(world, storm, seed).run()


async def _all(model: Path, only: str, requests: int, seed: int) -> int:
    """Play everything; return how many cells went wrong."""
    cells = [*of_prefill(), *of_decode(), *of_clients(), *of_refusals()]
    wrong = 0
    for title, some, storm, options in (
        ("on_loss: fail", cells, requests, {}),
        ("on_loss: compute", [*of_loss()], 0, {"on_loss": "compute"}),
    ):
        chosen = [cell for cell in some if only in str(cell)]
        if not chosen and not storm:
            continue
        print(f"\n{title}\n{HEAD}", flush=True)  # noqa: T201
        async for row in run(model, chosen, storm=storm, seed=seed, **options):
            print(row, flush=True)  # noqa: T201
            wrong += bool(row.wrong)
    return wrong


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cells whose names have this in them")
    parser.add_argument("--storm", type=int, default=200, help="requests of the storm")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        model = tiny_checkpoint(scratch, "llama", num_hidden_layers=2)
        sys.exit(asyncio.run(_all(model, args.only, args.storm, args.seed)))


if __name__ == "__main__":
    main()
