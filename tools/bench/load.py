"""The load: sends a run's sessions when they are due, and keeps a record of each request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegboard.tools.bench.apis import Api, Prompt, Wanted
from pegboard.tools.bench.connection import HttpClient, RequestFailed, Unreachable
from pegboard.tools.bench.records import STOPPED, Record
from pegboard.tools.bench.workloads import Session, Turn, follow

TICK = 0.25
"""Seconds between two looks at what is going on."""
INTERRUPTED = "interrupted"
GIVE_UP_AFTER = 10
"""So many times in a row the server took no connection: it is gone."""


@dataclass(slots=True)
class Outcome:
    """What a run has brought. Times are of time.perf_counter()."""

    wanted: int
    """How many requests there were to be."""
    records: list[Record] = field(default_factory=list)
    """In the order in which they were sent."""
    start: float = 0.0
    end: float = 0.0
    stopped: str = ""
    """Why the run did not go on to its end."""
    cpu_seconds: float = 0.0
    """What the client itself took of the processor."""

    @property
    def duration(self) -> float:
        return max(self.end - self.start, 1e-9)


@dataclass(slots=True)
class Progress:
    """How far a run is."""

    wanted: int
    done: int
    failed: int
    tokens: int
    seconds: float


Watcher = Callable[[Progress], None]
StopWhen = Callable[[Sequence[Record], float], str]
"""Looks at the records so far and the time; a reason to stop, or ""."""


class Load:
    """One run against one server. `keep`: further turns need the answers."""

    def __init__(
        self,
        client: HttpClient,
        api: Api,
        wanted: Wanted,
        *,
        watch: Watcher | None = None,
        stop_when: StopWhen | None = None,
    ) -> None:
        self._client = client
        self._api = api
        self._wanted = wanted
        self._watch = watch
        self._stop_when = stop_when
        self._outcome = Outcome(0)
        self._unreachable = 0
        self._done = 0
        self._failed = 0
        self._tokens = 0
        self._slots: asyncio.Semaphore | None = None
        self._main: asyncio.Task[None] | None = None

    async def closed(self, sessions: Sequence[Session], concurrency: int) -> Outcome:
        """So many sessions at a time; the next one begins when one has ended."""
        queue = deque(sessions)

        async def work() -> None:
            while queue:
                await self._converse(queue.popleft(), time.perf_counter())

        async def main() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(sessions))):
                    group.create_task(work())

        return await self._run(sessions, main())

    async def open(self, sessions: Sequence[Session], at: Sequence[float], limit: int | None = None) -> Outcome:
        """Run every session at its time, in seconds from the start, however busy the server is; with a `limit`, no
        more than so many at once.
        """
        self._slots = None if limit is None else asyncio.Semaphore(limit)

        async def main() -> None:
            start = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for session, when in zip(sessions, at, strict=True):
                    # A loop's timers are no finer than milliseconds, and may be early.
                    while (wait := start + when - time.perf_counter()) > 0:
                        await asyncio.sleep(wait)
                    group.create_task(self._limited(session, start + when))

        return await self._run(sessions, main())

    async def _run(self, sessions: Sequence[Session], main: Coroutine[Any, Any, None]) -> Outcome:
        outcome = self._outcome = Outcome(sum(len(one.turns) for one in sessions))
        cpu = time.process_time()
        outcome.start = time.perf_counter()
        self._main = asyncio.ensure_future(main)
        watcher = asyncio.ensure_future(self._look_after())
        try:
            await self._main
        except asyncio.CancelledError:
            # Ours, or Ctrl-C: what there is, is shown.
            outcome.stopped = outcome.stopped or INTERRUPTED
        finally:
            watcher.cancel()
            outcome.end = max((one.end for one in outcome.records), default=time.perf_counter())
            outcome.cpu_seconds = time.process_time() - cpu
            self._tell()
        return outcome

    async def _limited(self, session: Session, due: float) -> None:
        if self._slots is None:
            await self._converse(session, due)
            return
        async with self._slots:
            await self._converse(session, due)

    async def _converse(self, session: Session, due: float) -> None:
        prompt: Prompt = []
        answer: Sequence[int] | str = ""
        known: int | None = 0
        first = len(self._outcome.records)
        last = len(session.turns) - 1
        for number, turn in enumerate(session.turns):
            prompt = turn.new if number == 0 else follow(prompt, answer, turn.new)
            known = None if known is None or turn.input_len is None else known + turn.input_len
            record = Record(
                len(self._outcome.records), first, turn=number, input_len=known, output_len=turn.output_len, due=due
            )
            answer = await self._ask(prompt, turn, record, keep=number < last)
            if record.error:
                # The turns after it are never sent.
                return
            known = None if known is None else known + record.output_tokens
            due = time.perf_counter()

    async def _ask(self, prompt: Prompt, turn: Turn, record: Record, *, keep: bool) -> Sequence[int] | str:
        reader = self._api.reader(record, keep=keep)
        request = self._client.request("POST", self._api.path, self._api.encode(prompt, turn.output_len, self._wanted))
        self._outcome.records.append(record)
        record.sent = time.perf_counter()
        try:
            await self._client.send(request, reader)
            reader.finish()
        except RequestFailed as error:
            self._fail(record, str(error))
            self._unreachable = self._unreachable + 1 if isinstance(error, Unreachable) else 0
            if self._unreachable >= GIVE_UP_AFTER:
                self._stop(f"the server is gone: {error}")
        except asyncio.CancelledError:
            self._fail(record, STOPPED)
            raise
        else:
            record.over = True
            self._unreachable = 0
            self._done += 1
            self._tokens += record.output_tokens
        return (
            reader.ids if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else "".join(reader.text)
        )

    def _fail(self, record: Record, why: str) -> None:
        record.error, record.over = why, True
        record.end = time.perf_counter()
        self._failed += 1

    def _stop(self, why: str) -> None:
        if self._main is not None and not self._outcome.stopped:
            self._outcome.stopped = why
            self._main.cancel()

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self._tell()
            if self._stop_when is not None:
                why = self._stop_when(self._outcome.records, time.perf_counter())
                if why:
                    self._stop(why)

    def _tell(self) -> None:
        if self._watch is None:
            return
        outcome = self._outcome
        under_way = sum(len(one.times) for one in outcome.records if not one.over)
        seconds = time.perf_counter() - outcome.start
        self._watch(Progress(outcome.wanted, self._done, self._failed, self._tokens + under_way, seconds))
