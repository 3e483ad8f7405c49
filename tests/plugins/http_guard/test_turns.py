"""Requests begin in turns of the loop."""

from __future__ import annotations

import asyncio
import itertools

from pegboard.plugins.http_guard.turns import Turns


async def _crowd(turns: Turns, count: int, begun: list[int]) -> list[asyncio.Task[None]]:
    async def request(number: int) -> None:
        await turns.begin()
        begun.append(number)

    tasks = [asyncio.create_task(request(number)) for number in range(count)]
    await asyncio.sleep(0)
    return tasks


def test_a_crowd_begins_in_order_a_few_in_each_turn() -> None:
    async def run() -> None:
        turns, begun = Turns(at_once=16, of_a_crowd=4), list[int]()
        for _ in range(2):
            tasks = await _crowd(turns, 100, begun)
            seen = [len(begun)]
            while len(begun) < 100:
                await asyncio.sleep(0)
                seen.append(len(begun))
            assert begun == list(range(100))
            assert seen[0] == 16, "as many as there may be, and after a crowd again"
            assert max(after - before for before, after in itertools.pairwise(seen)) == 4
            await asyncio.gather(*tasks)
            begun.clear()
            for _ in range(3):
                await asyncio.sleep(0)

    asyncio.run(run())


def test_a_few_do_not_wait() -> None:
    async def run() -> None:
        turns, begun = Turns(at_once=4), list[int]()
        for _ in range(3):
            await _crowd(turns, 4, begun)
            assert len(begun) == 4
            begun.clear()
            await asyncio.sleep(0)

    asyncio.run(run())


def test_one_that_has_left_takes_no_turn() -> None:
    async def run() -> None:
        turns, begun = Turns(at_once=1, of_a_crowd=1), list[int]()
        tasks = await _crowd(turns, 5, begun)
        for one in tasks[1:4]:
            one.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert begun == [0, 4]

    asyncio.run(run())
