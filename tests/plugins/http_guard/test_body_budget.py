"""Room for bodies, and turns at the parser."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.http_guard.body_budget import BodyBudget, BodyShare, ParseTurns

SOON = 0.1
NEVER = 600.0


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scene()

    asyncio.run(main())


async def settled(task: asyncio.Future[None]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return task.done()


def test_one_body_goes_beyond_and_others_wait_for_room() -> None:
    async def scene() -> None:
        budget, first, second, third = BodyBudget(100, NEVER), BodyShare(), BodyShare(), BodyShare()
        await budget.take(first, 60)
        await budget.take(second, 40)
        # Full. The next to need more goes beyond, as far as it needs to.
        await budget.take(first, 30)
        await budget.take(first, 30)
        assert first.deadline is not None
        waiting = [asyncio.ensure_future(budget.take(share, 20)) for share in (second, third)]
        assert not await settled(waiting[0])
        # It has arrived, but holds what it has: there is no room yet.
        budget.arrived(first)
        assert first.deadline is None
        assert not await settled(waiting[0])  # type: ignore[unreachable]
        budget.give(first)
        assert await settled(waiting[0])
        assert await settled(waiting[1])
        for share in (second, third):
            budget.give(share)
        assert (budget.held, second.deadline) == (0, None)

    run(scene)


def test_bodies_that_wait_for_each_other_all_arrive() -> None:
    """Many that fill the room together, none of them complete."""

    async def scene() -> None:
        budget = BodyBudget(100, NEVER)
        most = 0

        async def arrive() -> None:
            nonlocal most
            share = BodyShare()
            for _ in range(10):
                await budget.take(share, 10)
                most = max(most, budget.held)
                await asyncio.sleep(0)
            budget.arrived(share)
            await asyncio.sleep(0)
            budget.give(share)

        await asyncio.gather(*(arrive() for _ in range(20)))
        assert budget.held == 0
        assert most <= 100 + 100

    run(scene)


def test_without_room_in_time_it_is_refused_and_harms_nobody() -> None:
    async def scene() -> None:
        budget, slow, beyond, late, last = BodyBudget(100, SOON), BodyShare(), BodyShare(), BodyShare(), BodyShare()
        await budget.take(slow, 100)
        await budget.take(beyond, 50)
        with pytest.raises(InvalidRequest) as caught:
            await budget.take(late, 1)
        assert (caught.value.status, caught.value.code) == (503, "bodies_full")
        leaving = asyncio.ensure_future(budget.take(late, 1))
        await asyncio.sleep(0)
        leaving.cancel()
        waiting = asyncio.ensure_future(budget.take(last, 1))
        await asyncio.sleep(0)
        for share in (late, beyond, slow):
            budget.give(share)
        await waiting
        assert budget.held == last.held == 1

    run(scene)


def test_stalled_bodies_lose_their_room_once_others_wait() -> None:
    """Before, they kept it for as long as a request may take to arrive, 120 s."""

    async def scene() -> None:
        budget, late = BodyBudget(100, NEVER, SOON), BodyShare()
        stalled, arrived = [BodyShare() for _ in range(3)], BodyShare()
        ended = []

        async def stall(share: BodyShare) -> None:
            try:
                async with share.in_time():
                    await asyncio.Event().wait()
            except InvalidRequest as error:
                ended.append((error.status, error.code))
            budget.give(share)

        await budget.take(arrived, 40)
        budget.arrived(arrived)
        for share in stalled:
            await budget.take(share, 30)
        tasks = [asyncio.ensure_future(stall(share)) for share in stalled]
        await asyncio.sleep(2 * SOON)
        assert [share.deadline for share in stalled[:2]] == [None, None], "nothing waits for their room"
        await budget.take(late, 30)
        await asyncio.gather(*tasks)
        assert set(ended) == {(408, "too_slow")}
        assert arrived.deadline is None, "it waits for us"
        assert budget.held == 70

    run(scene)


def test_time_in_which_a_body_waits_for_room_is_not_its_own() -> None:
    async def scene() -> None:
        budget, full, slow, last = BodyBudget(100, NEVER, 100.0), BodyShare(), BodyShare(), BodyShare()
        await budget.take(slow, 10)
        await budget.take(full, 90)
        await budget.take(BodyShare(), 1)
        began = slow.began
        waiting = asyncio.ensure_future(budget.take(slow, 10))
        await asyncio.sleep(0)
        waits_since = asyncio.get_running_loop().time()
        await asyncio.sleep(SOON)
        assert slow.deadline == began + 100
        waited = asyncio.get_running_loop().time() - waits_since
        budget.give(full)
        await waiting
        assert slow.deadline is None, "nothing waits any more"
        assert slow.began >= began + waited  # type: ignore[unreachable]
        more = asyncio.ensure_future(budget.take(last, 90))
        await asyncio.sleep(0)
        assert slow.deadline == slow.began + 100
        more.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert slow.deadline is None

    run(scene)


def test_turns_are_taken_one_by_one_with_pauses() -> None:
    async def scene() -> None:
        turns, busy, order = ParseTurns(), 0, list[str]()

        async def parse(name: str) -> None:
            nonlocal busy
            async with turns.turn(lambda size: None):
                busy += 1
                assert busy == 1
                order.append(name)
                await asyncio.sleep(0.05)
                busy -= 1
            order.append(f"{name} is answered")

        await asyncio.gather(parse("a"), parse("b"))
        # The answer does not wait for the pause; the next turn does.
        assert order == ["a", "a is answered", "b", "b is answered"]

    run(scene)
