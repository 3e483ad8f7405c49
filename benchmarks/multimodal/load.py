"""Requests to the servers under test, by the load tool of `pegboard bench`."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.multimodal.served import MODEL
from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.bench.apis import APIS, Api, Native, Prompt, Wanted
from pegboard.tools.bench.connection import Address, HttpClient
from pegboard.tools.bench.images import ImageSize, content_part, draw
from pegboard.tools.bench.load import Load, Outcome
from pegboard.tools.bench.serve import run_loop
from pegboard.tools.bench.workloads import Session, Turn

if TYPE_CHECKING:
    from numpy.random import Generator

    from pegboard.tools.bench.load import StopWhen

T = TypeVar("T")

TOKENS = (40, 360)
"""Ids from which prompts of tokens are drawn: no vocabulary here is smaller, and none of them is special."""
CHAT, NATIVE = APIS["openai-chat"], APIS["native"]
"""Only the native API says how many tokens have come where these are no text yet: a random model writes half
characters.
"""
MEGAPIXEL = ImageSize(1024, 1024)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it on the load tool's event loop."""

    async def main() -> T:
        return await work

    return run_loop(main)


@contextlib.asynccontextmanager
async def client_of(url: str) -> AsyncIterator[HttpClient]:
    client = HttpClient(Address.parse(url))
    try:
        yield client
    finally:
        client.close()


def load(client: HttpClient, api: Api, stop_when: StopWhen | None = None) -> Load:
    return Load(client, api, Wanted(MODEL), stop_when=stop_when)


def once(prompt: Prompt, output_len: int, input_len: int | None = None) -> Session:
    return Session([Turn(prompt, output_len, input_len)])


def tokens(random: Generator, count: int) -> list[int]:
    found: list[int] = random.integers(*TOKENS, count).tolist()
    return found


class Showing(Native):
    """The native API, asked about a picture: its prompts are one dictionary of `text` and `image_data`."""

    def body(self, prompt: Prompt, output_len: int, wanted: Wanted) -> dict[str, Any]:
        assert isinstance(prompt[0], dict)
        return {**super().body("", output_len, wanted), **prompt[0]}


def shown(picture: dict[str, Any], question: str, before: str) -> list[dict[str, Any]]:
    """Return a prompt of `Showing`: a picture between two texts."""
    text = f"{before}<|vision_start|><|image_pad|><|vision_end|>{question}"
    return [{"text": text, "image_data": [picture["image_url"]["url"]]}]


def about(picture: dict[str, Any], question: str) -> list[dict[str, Any]]:
    """Return messages that ask about a picture."""
    return [{"role": "user", "content": [picture, {"type": "text", "text": question}]}]


def pictures(random: Generator, count: int, size: ImageSize = MEGAPIXEL) -> list[dict[str, Any]]:
    """Return new pictures as parts of messages."""
    return [content_part(draw(random, size)) for _ in range(count)]


def checked(outcome: Outcome) -> Outcome:
    """Return it. Raises PegboardError where a request failed."""
    if errors := [one.error for one in outcome.records if one.error]:
        raise PegboardError(f"{len(errors)} of {len(outcome.records)} requests failed: {errors[0]}")
    return outcome


async def in_turn(client: HttpClient, api: Api, sessions: Sequence[Session]) -> Outcome:
    """Send one after the other."""
    return checked(await load(client, api).closed(sessions, 1))


async def rest(seconds: float) -> None:
    """Let the machine settle."""
    await asyncio.sleep(seconds)


def ratio(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the median of the pairs' ratios, and the smallest and largest."""
    found = [first / second for first, second in pairs]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}
