"""The cells of disagg_faults.py: a state of a request, what breaks in it, and what is to be seen then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from tests.faults.disagg_world import DECODE, EMPTY_WITHIN, LONG, PREFILL, TIMES, Prompt, Sent, World, Wrong

SLOW = 60e3
"""Bytes per second of a slow link: the long prompt's 1.3 MB take longer than anything waits."""
PAUSE = 0.8
"""Seconds for which a server is stopped without being lost."""
AT_ONCE = 1.0
LOST = 3 * TIMES["ping"]
"""Seconds after which a server that says nothing is given up."""
NO_CONNECTION = TIMES["connect_timeout"]
HELD = TIMES["hold"] + AT_ONCE
WAITED = TIMES["timeout"]
PATIENT = 30.0
"""Seconds for answers that nothing holds up, but which are long."""
OK, LEFT, BROKEN = 200, -1, 0

Reach = Callable[[World], Awaitable[Sent]]
Play = Callable[[World, Sent], Awaitable[None]]


@dataclass(frozen=True)
class Cell:
    """`play` breaks something once a request is in a state; then each server answers with one of its statuses, the last
    one after `within` seconds at most. `victim` is the server that others cannot use meanwhile.
    """

    reach: Reach
    what: str
    play: Play
    prefill: set[int]
    decode: set[int]
    within: float = AT_ONCE
    victim: str = ""

    def __str__(self) -> str:
        return f"{self.what}, {self.reach.__name__.replace('_', ' ')}"


# ---- states ----------------------------------------------------------------------------------------------------------


async def bootstrapping(world: World) -> Sent:
    """Prefill has the request, and decode has it; the two have no connection."""
    world.control.deaf = True
    world.control.cut()
    await asyncio.sleep(TIMES["ping"])
    sent = world.send(world.long)

    async def reached() -> bool:
        there, here = await world.rooms_of(world.prefill), await world.rooms_of(world.decode)
        return there["rooms_held"] == here["rooms"] == 1

    await world.until("both have the request", reached)
    return sent


async def waiting(world: World, before: int = 1) -> Sent:
    """Decode has asked; prefill has not begun, since the KV of others waits to be taken."""
    for _ in range(before):
        world.send(world.long, only=PREFILL)

    async def occupied() -> bool:
        now = await world.rooms_of(world.prefill)
        return now["rooms"] == before and now["rooms_held"] == 1

    await world.until("others wait to be taken", occupied)
    sent = world.send(world.long)

    async def reached() -> bool:
        here, there = await world.state(world.decode), await world.state(world.prefill)
        return bool(here["blocked_requests"] == 1 and there["blocked_requests"] == before)

    await world.until("both have the request", reached)
    await asyncio.sleep(0.1)
    return sent


async def waiting_behind_three(world: World) -> Sent:
    return await waiting(world, 3)


async def waiting_for_memory(world: World) -> Sent:
    """Prefill has answered, and decode has no memory for a seat, for a while."""
    for _ in range(6):
        world.plain(world.decode, Prompt([*world.long.ids, *range(3, 300), *range(3, 300)], [0] * 1000))

    async def full() -> bool:
        now = await world.state(world.decode)
        return bool(now["total_tokens"] - now["held_tokens"] - now["locked_tokens"] < LONG)

    await world.until("decode is full", full)
    sent = world.send(world.long)
    await sent.answer(PREFILL)
    now = await world.state(world.decode)
    if (now["blocked_requests"], now["seated_requests"]) != (1, 0):
        raise Wrong("it does not wait for memory")
    return sent


async def computing(world: World) -> Sent:
    """Prefill computes, and decode reads what is there already; by the time that something breaks it may be over."""
    sent = world.send(world.long)

    async def reached() -> bool:
        return bool((await world.state(world.prefill))["running_requests"]) or sent.tasks[PREFILL].done()

    await world.until("it is computed", reached)
    return sent


async def transferring(world: World) -> Sent:
    """Prefill has answered, and decode reads."""
    world.data.rate = SLOW
    sent = world.send(world.long)

    async def reached() -> bool:
        here, there = await world.state(world.decode), await world.rooms_of(world.prefill)
        reads = here["gate_stats"]["disagg"]["reads"]
        return bool(here["seated_requests"] == 1 and reads > 0 and there["rooms_held"] == 1)

    await world.until("decode reads", reached)
    return sent


async def joined(world: World) -> Sent:
    """All is taken, and decode writes a long answer."""
    sent = world.send(world.longest)

    async def reached() -> bool:
        here = await world.state(world.decode)
        return bool(here["running_requests"] == 1 and not here["gate_stats"]["disagg"]["rooms"])

    await world.until("decode writes", reached)
    return sent


async def refused_by_prefill(world: World) -> Sent:
    return world.send(world.long, bad=PREFILL)


async def refused_by_decode(world: World) -> Sent:
    return world.send(world.long, bad=DECODE)


async def while_prefill_starts(world: World) -> Sent:
    """Prefill's scheduler is being replaced."""
    world.prefill.kill_scheduler()
    await asyncio.sleep(0.5)
    return world.send(world.long)


async def while_decode_starts(world: World) -> Sent:
    world.decode.kill_scheduler()
    await asyncio.sleep(0.5)
    return world.send(world.long)


STATES = (bootstrapping, waiting, computing, transferring, joined)
BEFORE = (bootstrapping, waiting, transferring)
STOPPED = {bootstrapping: NO_CONNECTION, waiting: HELD}
"""Where a stopped prefill server takes longer than to be lost; when it goes on others still wait to be taken."""

# ---- what breaks -----------------------------------------------------------------------------------------------------


async def nothing(world: World, sent: Sent) -> None:
    """What is slow stays so."""


async def normal(world: World, sent: Sent) -> None:
    """The links carry all that comes."""
    world.control.deaf, world.data.rate = False, 0.0


def killed(role: str) -> Play:
    async def play(world: World, sent: Sent) -> None:
        await asyncio.to_thread((world.prefill if role == PREFILL else world.decode).kill)
        world.control.deaf = False
        world.control.cut()

    return play


def stopped(role: str) -> Play:
    """Stop a server until the other one has answered, and has nothing left."""

    async def play(world: World, sent: Sent) -> None:
        server, other = (world.prefill, world.decode) if role == PREFILL else (world.decode, world.prefill)
        server.stop()
        world.control.deaf = False
        await sent.answer(DECODE if role == PREFILL else PREFILL)
        began = time.monotonic()
        while left := await world.left(other):
            if time.monotonic() - began > EMPTY_WITHIN:
                raise Wrong(f"while {role} is stopped the other one still has {left}")
            await asyncio.sleep(0.05)
        server.go_on()

    return play


def paused(role: str) -> Play:
    """Stop a server for less long than it takes to be lost."""

    async def play(world: World, sent: Sent) -> None:
        server = world.prefill if role == PREFILL else world.decode
        server.stop()
        await asyncio.sleep(PAUSE)
        server.go_on()
        await normal(world, sent)

    return play


async def prefill_anew(world: World, sent: Sent) -> None:
    """Kill its scheduler; another server answers at its address."""
    world.prefill.kill_scheduler()
    world.control.to = ("127.0.0.1", world.spare.bootstrap)
    world.control.deaf = False
    world.control.cut()


async def decode_anew(world: World, sent: Sent) -> None:
    """Kill its scheduler, which its server replaces."""
    world.decode.kill_scheduler()
    world.control.deaf = False


def left(*sides: str) -> Play:
    """Have clients go."""

    async def play(world: World, sent: Sent) -> None:
        sent.leave(*sides)
        await normal(world, sent)

    return play


# ---- cells -----------------------------------------------------------------------------------------------------------


def of_prefill() -> Iterator[Cell]:
    for reach in BEFORE:
        there = {BROKEN} if reach is waiting else {OK}
        yield Cell(reach, "prefill killed", killed(PREFILL), there, {502}, victim=PREFILL)
        within = STOPPED.get(reach, LOST)
        yield Cell(reach, "prefill stopped", stopped(PREFILL), {OK}, {502}, within + AT_ONCE, PREFILL)
        yield Cell(reach, "prefill pauses", paused(PREFILL), {OK}, {OK}, HELD, PREFILL)
    yield Cell(computing, "prefill killed", killed(PREFILL), {BROKEN, OK}, {OK, 502}, victim=PREFILL)
    yield Cell(computing, "prefill stopped", stopped(PREFILL), {OK}, {OK, 502}, LOST + AT_ONCE, PREFILL)
    for what, play in (("killed", killed(PREFILL)), ("stopped", stopped(PREFILL)), ("anew", prefill_anew)):
        yield Cell(joined, f"prefill {what}", play, {OK}, {OK}, PATIENT, PREFILL)
    yield Cell(bootstrapping, "prefill deaf", nothing, {OK}, {502}, NO_CONNECTION)
    yield Cell(waiting_behind_three, "prefill full", nothing, {504}, {502, 504}, WAITED)
    yield Cell(transferring, "prefill slow", nothing, {OK}, {504}, WAITED)
    yield Cell(bootstrapping, "prefill anew", prefill_anew, {OK}, {502}, victim=PREFILL)
    yield Cell(waiting, "prefill anew", prefill_anew, {503}, {502}, victim=PREFILL)
    yield Cell(transferring, "prefill anew", prefill_anew, {OK}, {502}, victim=PREFILL)


def of_decode() -> Iterator[Cell]:
    for reach in STATES:
        within = HELD if reach is waiting else AT_ONCE
        late = {OK} if reach is computing else set()
        yield Cell(reach, "decode killed", killed(DECODE), {OK}, {BROKEN} | late, within, DECODE)
        yield Cell(reach, "decode anew", decode_anew, {OK}, {503} | late, within, DECODE)
    for reach in BEFORE:
        yield Cell(reach, "decode stopped", stopped(DECODE), {OK}, {502, 504}, HELD + WAITED, DECODE)
        yield Cell(reach, "decode pauses", paused(DECODE), {OK}, {OK}, HELD, DECODE)
    yield Cell(joined, "decode stopped", stopped(DECODE), {OK}, {OK}, PATIENT, DECODE)
    yield Cell(waiting_for_memory, "decode full", nothing, {OK}, {OK, 504}, WAITED, DECODE)


def of_clients() -> Iterator[Cell]:
    for reach in STATES:
        there = {waiting: {LEFT}, computing: {LEFT, OK}}.get(reach, {OK})
        here = {waiting: {502}, computing: {OK, 502}}.get(reach, {OK})
        within = PATIENT if reach is joined else HELD
        yield Cell(reach, "client leaves prefill", left(PREFILL), there, here, within)
        yield Cell(reach, "client leaves decode", left(DECODE), {OK}, {LEFT}, HELD)
        yield Cell(reach, "client leaves both", left(PREFILL, DECODE), there, {LEFT})


def of_refusals() -> Iterator[Cell]:
    """One side takes the request, and the other one never hears of it."""
    yield Cell(refused_by_prefill, "400 from prefill", nothing, {400}, {504}, WAITED)
    yield Cell(refused_by_decode, "400 from decode", nothing, {OK}, {400})
    yield Cell(while_prefill_starts, "503 from prefill", nothing, {503}, {502}, victim=PREFILL)
    yield Cell(while_decode_starts, "503 from decode", nothing, {OK}, {503}, victim=DECODE)


def of_loss() -> Iterator[Cell]:
    """With `on_loss: compute` decode computes what it does not get."""
    for reach in BEFORE:
        there = {BROKEN} if reach is waiting else {OK}
        yield Cell(reach, "prefill killed", killed(PREFILL), there, {OK}, 2 * AT_ONCE, PREFILL)
        within = STOPPED.get(reach, LOST)
        yield Cell(reach, "prefill stopped", stopped(PREFILL), {OK}, {OK}, within + 2 * AT_ONCE, PREFILL)
    yield Cell(transferring, "prefill anew", prefill_anew, {OK}, {OK}, 2 * AT_ONCE, PREFILL)
    yield Cell(transferring, "prefill slow", nothing, {OK}, {OK}, WAITED)
