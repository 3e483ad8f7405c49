"""What ends first, work or an event, and what becomes of the work."""

from __future__ import annotations

import asyncio

from pegboard.toolkit.system.event_loop import ended_before


def test_work_that_ends_first() -> None:
    async def scene() -> None:
        failing = asyncio.get_running_loop().create_future()
        failing.set_exception(ValueError("its own"))
        for work in (asyncio.sleep(0), failing):
            assert await ended_before(work, asyncio.Event())
        assert isinstance(failing.exception(), ValueError)

    asyncio.run(scene())


def test_an_event_cancels_the_work() -> None:
    async def scene() -> None:
        event = asyncio.Event()
        event.set()
        work = asyncio.ensure_future(asyncio.sleep(60))
        assert not await ended_before(work, event)
        assert work.cancelled()

    asyncio.run(scene())
