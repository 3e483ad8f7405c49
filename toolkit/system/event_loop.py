"""Helpers for programs with an event loop: the fastest loop, and waiting for the first of two events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes uvloop's loops; None, for asyncio's own, where it is not installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def ended_before(work: Awaitable[object], event: asyncio.Event) -> bool:
    """Wait for `work` or `event`. True where the work ended (well or not); else it has been cancelled."""
    task = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return True
        task.cancel()
        await asyncio.wait({task})
        return False
    finally:
        waiting.cancel()
