"""For API plugins: several requests that one HTTP request stands for (a batch, `n` answers), read together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegboard.core.interfaces.client import EngineClient, GenerateRequest, OutputChunk, OutputStream

MAX_REQUESTS = 1024
"""Most engine requests that one HTTP request may stand for."""


@dataclass(slots=True)
class Answer:
    """One request's output so far."""

    rid: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, int, list[tuple[float, int]]]] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0

    def add(self, chunk: OutputChunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs or ()
        self.finish_reason = chunk.finish_reason
        self.prompt_tokens = chunk.prompt_tokens
        self.completion_tokens = chunk.completion_tokens
        self.cached_tokens = chunk.cached_tokens
        self.num_retractions = chunk.num_retractions


class Answers:
    """Accepted requests, read together. `aclose` aborts those that have not finished."""

    def __init__(self, streams: Sequence[OutputStream]) -> None:
        self._streams = list(streams)
        self.answers = [Answer(stream.rid) for stream in self._streams]
        """What has been read so far, in the order of the requests."""
        self._pumps: list[asyncio.Future[None]] = []

    @classmethod
    async def submit(cls, client: EngineClient, requests: Sequence[GenerateRequest]) -> Answers:
        """Submit all at once. Where one is refused the others are aborted and its InvalidRequest is raised."""
        tasks = [asyncio.ensure_future(client.submit(request)) for request in requests]
        try:
            return cls(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            for done in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(done, OutputStream):
                    await done.aclose()
            raise

    async def chunks(self) -> AsyncIterator[tuple[int, OutputChunk]]:
        """(index of the request, what is new of it), as it comes; the matching `Answer` is up to date."""
        if len(self._streams) == 1:
            async for chunk in self._streams[0]:
                self.answers[0].add(chunk)
                yield 0, chunk
            return
        # One place per stream: a slow reader makes chunks larger, not more.
        queue: asyncio.Queue[tuple[int, OutputChunk | Exception | None]] = asyncio.Queue(len(self._streams))
        self._pumps = [asyncio.ensure_future(_pump(i, stream, queue)) for i, stream in enumerate(self._streams)]
        unfinished = len(self._pumps)
        try:
            while unfinished:
                index, item = await queue.get()
                if item is None:
                    unfinished -= 1
                    continue
                if isinstance(item, Exception):
                    raise item
                self.answers[index].add(item)
                yield index, item
        finally:
            await self._stop_pumps()

    async def collect(self) -> list[Answer]:
        """All answers, when all have finished. On any error, cancellation included, the rest is aborted."""
        try:
            async for _ in self.chunks():
                pass
        finally:
            await self.aclose()
        return self.answers

    async def aclose(self) -> None:
        for stream in self._streams:
            await stream.aclose()
        await self._stop_pumps()

    async def _stop_pumps(self) -> None:
        pumps, self._pumps = self._pumps, []
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, stream: OutputStream, queue: asyncio.Queue[tuple[int, OutputChunk | Exception | None]]
) -> None:
    try:
        async for chunk in stream:
            await queue.put((index, chunk))
    except Exception as error:
        await queue.put((index, error))
    else:
        await queue.put((index, None))
