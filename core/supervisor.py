"""The supervisor: starts the scheduler process, waits for it, notices its end, and starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.client import ModelInfo
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.interfaces.messages import FromScheduler, Ready, Shutdown, StartFailed
from pegboard.core.scheduler_process import BUILDER, Orders
from pegboard.core.wire import ApiWire, Endpoint

if TYPE_CHECKING:
    from pegboard.core.client import AsyncEngineClient
    from pegboard.core.compose import ResolvedConfig

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
RESTART_WINDOW = 600.0
"""A scheduler that ends more often than `MAX_RESTARTS` times within so many seconds is given up."""
STOP_TIMEOUT = 5.0
_LAST_WORDS = 1.0
"""Seconds that a message may still be on its way when the process has ended."""


class SchedulerProcess:
    """One scheduler process and the API's end of its wire."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: Endpoint, wire: ApiWire) -> None:
        self.wire = wire
        self.pid = process.pid
        self._process = process
        self._endpoint = endpoint
        self._listens = False

    @classmethod
    async def spawn(cls, config: str, builder: str = BUILDER) -> SchedulerProcess:
        """Start one. It knows this process through a pipe, and ends when that closes."""
        endpoint = Endpoint()
        wire = ApiWire(endpoint)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pegboard.core.scheduler_process", stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        orders = Orders(address=endpoint.address, config=config, builder=builder)
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        return cls(process, endpoint, wire)

    async def ready(self) -> Ready:
        """Wait until it has loaded its model. Raises PegboardError with its own message where it could not."""
        hearing = asyncio.ensure_future(self.wire.receive())
        ending = asyncio.ensure_future(self._process.wait())
        try:
            await asyncio.wait({hearing, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done():
                await asyncio.wait({hearing}, timeout=_LAST_WORDS)
            if not hearing.done():
                raise PegboardError(f"the scheduler process {describe_exit(ending.result())} while it was starting")
            ready = _ready(hearing.result())
            self._listens = True
            return ready
        finally:
            for task in (hearing, ending):
                task.cancel()

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask it to exit, kill it if it does not, and remove what it leaves. May be called twice."""
        pipe = self._process.stdin
        if self._process.returncode is None:
            if self._listens:
                self.wire.send([Shutdown()])
            elif pipe is not None:
                pipe.close()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        if pipe is not None:
            pipe.close()
        self.wire.close()
        self._endpoint.close()


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds to wait before each restart in a row: doubling from `first` up to `longest`."""

    first: float = 0.5
    longest: float = 10.0

    def delay(self, restarts: int) -> float:
        return float(min(self.longest, self.first * 2 ** max(0, restarts - 1)))


class Supervisor:
    """Keeps one scheduler process running behind a client."""

    def __init__(self, resolved: ResolvedConfig, *, builder: str = BUILDER, backoff: Backoff | None = None) -> None:
        self._config = resolved.to_json()
        self._builder = builder
        self._backoff = backoff or Backoff()
        self._current: SchedulerProcess | None = None
        self._ends: deque[float] = deque(maxlen=MAX_RESTARTS)

    @property
    def pid(self) -> int | None:
        """The process id of the running scheduler."""
        return None if self._current is None else self._current.pid

    async def start(self) -> tuple[ApiWire, Ready]:
        """Start a scheduler and wait until it is ready. Raises PegboardError where it is not going to be."""
        self._current = await SchedulerProcess.spawn(self._config, self._builder)
        try:
            return self._current.wire, await self._current.ready()
        except BaseException:
            await self.stop()
            raise

    async def watch(self, client: AsyncEngineClient) -> None:
        """Restart the scheduler whenever it ends. Raises PegboardError when that helps no more; returns never."""
        while True:
            assert self._current is not None
            end = describe_exit(await self._current.wait())
            logger.error("the scheduler process %s; its requests fail, and it is started again", end)
            client.detach(f"the engine stopped while it served this request: its process {end}")
            await self.stop()
            await self._restart(client, end)

    async def _restart(self, client: AsyncEngineClient, end: str) -> None:
        while True:
            now = time.monotonic()
            if len(self._ends) == MAX_RESTARTS and now - self._ends[0] < RESTART_WINDOW:
                raise PegboardError(f"the scheduler process {end}; {MAX_RESTARTS} restarts have not helped, giving up")
            self._ends.append(now)
            recent = sum(1 for one in self._ends if now - one < RESTART_WINDOW)
            await asyncio.sleep(self._backoff.delay(recent))
            try:
                wire, ready = await self.start()
            except PegboardError as error:
                end = f"does not start again: {error}"
                logger.error("the scheduler process %s", end)
                continue
            client.attach(wire, ModelInfo(**ready.info))
            logger.warning("the scheduler process runs again")
            return

    async def stop(self) -> None:
        """Stop the scheduler, if there is one."""
        current, self._current = self._current, None
        if current is not None:
            await current.stop()


def describe_exit(code: int) -> str:
    """How a process ended, for a sentence that begins with it."""
    if code < 0:
        hint = " (the kernel kills so when memory runs out)" if code == -9 else ""
        return f"was ended by signal {-code}{hint}"
    return f"exited with code {code}"


def _ready(messages: list[FromScheduler]) -> Ready:
    first = messages[0]
    if isinstance(first, StartFailed):
        raise PegboardError(first.message)
    if not isinstance(first, Ready):
        raise PegboardError(f"the scheduler process began with {type(first).__name__} instead of Ready")
    return first
