"""Prefill servers that are stopped and killed while they are read through a library that does not tell at once.

While a server is stopped, a read of it may still write, for all that is known: the memory stays out of
use until that server goes on or ends.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from tests.faults.disagg_cells import AT_ONCE, LOST, OK, Cell, Play
from tests.faults.disagg_world import DECODE, EMPTY_WITHIN, LONG, PREFILL, Prompt, Sent, World, Wrong

STAYS = 2.0
"""Seconds for which memory must stay out of use while the server that it was read from is stopped."""


async def stopped_while_it_is_read(world: World) -> Sent:
    """Prefill has answered and is stopped; decode has memory for the KV only then, and begins to read."""
    ids = [*world.long.ids, *range(3, 300), *range(3, 300)]
    fillers = [world.plain(world.decode, Prompt(ids, [0] * 900)) for _ in range(2)]

    async def full() -> bool:
        now = await world.state(world.decode)
        return bool(now["total_tokens"] - now["held_tokens"] - now["locked_tokens"] < LONG)

    await world.until("decode is full", full)
    sent = world.send(world.long)
    await sent.answer(PREFILL)
    world.prefill.stop()
    for one in fillers:
        one.leave(DECODE)

    async def reads() -> bool:
        now = await world.state(world.decode)
        return bool(now["seated_requests"] == 1 and now["gate_stats"]["disagg"]["reads"] > 0)

    await world.until("decode reads", reads)
    return sent


async def ends(world: World, sent: Sent) -> None:
    await asyncio.to_thread(world.prefill.kill)


def stays(then: Play) -> Play:
    """Leave it stopped: the request ends, and its memory stays out of use until `then`."""

    async def play(world: World, sent: Sent) -> None:
        await sent.answer(DECODE)
        until = time.monotonic() + STAYS
        while time.monotonic() < until:
            left = await world.left(world.decode)
            if (left.get("held_requests"), left.get("quarantined_tokens")) != (1, LONG):
                raise Wrong(f"while prefill is stopped decode has {left}")
            await asyncio.sleep(0.1)
        await then(world, sent)
        began = time.monotonic()
        while left := await world.left(world.decode):
            if time.monotonic() - began > EMPTY_WITHIN:
                raise Wrong(f"decode still has {left}")
            await asyncio.sleep(0.1)

    return play


async def goes_on(world: World, sent: Sent) -> None:
    world.prefill.go_on()


def of_libraries() -> Iterator[Cell]:
    reach = stopped_while_it_is_read
    yield Cell(reach, "killed", ends, {OK}, {502}, AT_ONCE, PREFILL)
    yield Cell(reach, "goes on", stays(goes_on), {OK}, {502}, LOST + AT_ONCE, PREFILL)
    yield Cell(reach, "killed later", stays(ends), {OK}, {502}, LOST + AT_ONCE, PREFILL)


async def streamed(world: World, prompt: Prompt, number: int) -> list[int]:
    """Return the tokens of a streamed answer, each of whose events has one more than the last one. Raises Wrong, with
    the log of a server that has broken the connection.
    """
    said = {"bootstrap_host": "127.0.0.1", "bootstrap_port": world.spare.bootstrap, "bootstrap_room": 10**6 + number}
    body = {**prompt.salted(f"streamed {number}"), **said, "stream": True}
    there = asyncio.create_task(prefilled(world, body))
    try:
        tokens = await decoded(world, body)
        await there
    except httpx.HTTPError as error:
        raise world.decode.lost(error) from error
    finally:
        there.cancel()
        await asyncio.gather(there, return_exceptions=True)
    return tokens


async def prefilled(world: World, body: Mapping[str, Any]) -> None:
    try:
        (await world.client.post(f"{world.spare.address}/generate", json=body)).raise_for_status()
    except httpx.HTTPError as error:
        raise world.spare.lost(error) from error


async def decoded(world: World, body: Mapping[str, Any]) -> list[int]:
    tokens: list[int] = []
    async with world.client.stream("POST", f"{world.decode.address}/generate", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise Wrong(f"a stream ends with {event['error']}")
                now: list[int] = event["output_ids"]
                if now[: len(tokens)] != tokens:
                    raise Wrong(f"{tokens} were sent before {now}")
                tokens = now
    return tokens


async def many(world: World) -> None:
    """Ask for many answers at once, whole ones and streamed ones. Raises a group of Wrong where one is not that of one
    server; the other streams end with the first that fails.
    """
    prompts = [world.long, *world.short] * 2
    whole = [world.send(prompt, over=over) for prompt in prompts for over in (world.control, world.spare)]
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(streamed(world, prompt, number)) for number, prompt in enumerate(prompts)]
    for prompt, stream in zip(prompts, streams, strict=True):
        if stream.result() != prompt.answer:
            raise Wrong(f"a stream has {stream.result()} instead of {prompt.answer}")
    for one in whole:
        for side in (PREFILL, DECODE):
            if (answer := await one.answer(side)).status != OK:
                raise Wrong(f"{side} answers {answer}")
    await world.empties(time.monotonic())
