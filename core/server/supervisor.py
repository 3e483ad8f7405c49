"""The supervisor: starts the scheduler process, waits for it, notices its end, and starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.config.sources import ENV_PREFIX
from pegboard.core.interfaces.client import ModelInfo
from pegboard.core.interfaces.errors import PegboardError, Temporary
from pegboard.core.interfaces.messages import FromScheduler, Ready, Shutdown, StartFailed
from pegboard.core.server.scheduler_process import BUILDER, Orders
from pegboard.toolkit.system.redact import is_secret
from pegboard.toolkit.system.wire import ApiWire, Endpoint, last_words_of

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.server.client import AsyncEngineClient

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
RESTART_WINDOW = 600.0
"""A scheduler that ends more often than `MAX_RESTARTS` times within so many seconds is given up."""
STOP_TIMEOUT = 5.0
MAX_INTERVAL = 5.0
"""Seconds of silence after which a scheduler is asked for a sign of life, at most."""
SILENCE_GRACE = 2.0
"""Seconds that a message may be under way beyond the time that a step may take."""
_LAST_WORDS = 1.0
"""Seconds that a message may still be on its way when the process has ended."""


class SchedulerProcess:
    """One scheduler process and the API's end of its wire. Its maker stops it, whatever became of `spawn`."""

    def __init__(self) -> None:
        self._endpoint = Endpoint()
        try:
            self.wire = ApiWire(self._endpoint)
        except BaseException:
            self._endpoint.close()
            raise
        self._spawning: asyncio.Future[asyncio.subprocess.Process] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._listens = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def last_words(self) -> str:
        """Why the process has ended itself, for a sentence that begins with it; "" where it has not said so."""
        with contextlib.suppress(OSError):
            return f"ended: {last_words_of(self._endpoint.address).read_text('utf-8', 'replace')}"
        return ""

    async def spawn(self, config: str, builder: str = BUILDER, scratch: str = "") -> None:
        """Start it; it ends when its pipe from this process closes. Raises PegboardError where the system refuses."""
        orders = Orders(address=self._endpoint.address, config=config, builder=builder, scratch=scratch)
        self._spawning = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "pegboard.core.server.scheduler_process",
                stdin=asyncio.subprocess.PIPE,
                env=_environment(),
            )
        )
        try:
            # Shielded: one that is cancelled half-way may leave a process that is not known.
            self._process = await asyncio.shield(self._spawning)
        except OSError as error:
            raise PegboardError(f"the scheduler process cannot be started: {error}") from None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(orders) + b"\n")

    async def ready(self) -> Ready:
        """Wait until it has loaded its model. Raises PegboardError with its own message where it could not."""
        hearing = asyncio.ensure_future(self.wire.receive())
        ending = asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait({hearing, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not hearing.done():
                await asyncio.wait({hearing}, timeout=_LAST_WORDS)
            if not hearing.done():
                end = self.last_words or describe_exit(ending.result())
                raise Temporary(f"the scheduler process {end} while it was starting")
            ready = _ready(hearing.result())
            self._listens = True
            return ready
        finally:
            for task in (hearing, ending):
                task.cancel()

    async def wait(self) -> int:
        """Return its exit code, once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        """End it as it stands: one that is stopped or hung does not hear anything else."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def stop(self) -> None:
        """Ask it to exit, kill it if it does not, and clean up. May be called again, also after a cancelled call."""
        if self._process is None and self._spawning is not None:
            with contextlib.suppress(OSError):
                self._process = await asyncio.shield(self._spawning)
        process = self._process
        if process is not None and process.returncode is None:
            if self._listens:
                self.wire.send([Shutdown()])
            elif process.stdin is not None:
                process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT)
            except TimeoutError:
                await self.kill()
        if process is not None and process.stdin is not None:
            process.stdin.close()
        self.wire.close()
        self._endpoint.close()


class Silence:
    """Tells a scheduler that has fallen silent: stopped, or hung where its own watchdog does not see it.

    While nothing comes from it, it is asked for a sign of life; `limit` seconds without an answer are too many. One
    step may legitimately take `watchdog_timeout`, and its own watchdog, which leaves tracebacks, allows a quarter more;
    so the limit lies after that. What counts is time in which this process runs: if it was stopped itself, as part of
    a job of a terminal perhaps, the scheduler gets its time anew.
    """

    def __init__(self, watchdog_timeout: float) -> None:
        self.interval = min(MAX_INTERVAL, watchdog_timeout / 4)
        self.limit = 1.25 * watchdog_timeout + SILENCE_GRACE

    async def of(self, client: AsyncEngineClient) -> str:
        """Return how it ended, for a sentence that begins with the process, once that is certain."""
        heard, silent = client.heard, 0.0
        while silent < self.limit:
            await asyncio.sleep(self.interval)
            if client.heard != heard:
                heard, silent = client.heard, 0.0
                continue
            if silent == 0.0:
                client.ping()
            silent += self.interval
        return f"did not answer for {self.limit:g} s (stopped or hung), and was killed"


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds to wait before each restart in a row: doubling from `first` up to `longest`."""

    first: float = 0.5
    longest: float = 10.0

    def delay(self, restarts: int) -> float:
        return float(min(self.longest, self.first * 2 ** max(0, restarts - 1)))


class Supervisor:
    """Keeps one scheduler process running behind a client. `scratch` is a folder that the processes share."""

    def __init__(
        self, resolved: ResolvedConfig, *, builder: str = BUILDER, backoff: Backoff | None = None, scratch: str = ""
    ) -> None:
        self._config = resolved.to_json(keys=False)
        self._builder = builder
        self._scratch = scratch
        self._backoff = backoff or Backoff()
        self._silence = Silence(resolved.engine.scheduler.watchdog_timeout)
        self._current: SchedulerProcess | None = None
        self._ends: deque[float] = deque(maxlen=MAX_RESTARTS)

    @property
    def pid(self) -> int | None:
        """The process id of the running scheduler."""
        return None if self._current is None else self._current.pid

    async def start(self) -> tuple[ApiWire, Ready]:
        """Start a scheduler and wait until it is ready. Raises PegboardError where it is not going to be."""
        self._current = current = SchedulerProcess()
        try:
            await current.spawn(self._config, self._builder, self._scratch)
            return current.wire, await current.ready()
        except BaseException:
            await self.stop()
            raise

    async def watch(self, client: AsyncEngineClient) -> None:
        """Restart the scheduler when it ends, falls silent or talks nonsense. Raises PegboardError once that fails."""
        while True:
            assert self._current is not None
            end = await self._end(self._current, client)
            logger.error("the scheduler process %s; its requests fail, and it is started again", end)
            client.detach(f"the engine stopped while it served this request: its process {end}")
            await self.stop()
            await self._restart(client, end)

    async def _end(self, current: SchedulerProcess, client: AsyncEngineClient) -> str:
        """Wait until the process has ended, or must be ended because it is of no use any more. How that came."""
        ending = asyncio.ensure_future(current.wait())
        troubles = [asyncio.ensure_future(client.broken()), asyncio.ensure_future(self._silence.of(client))]
        try:
            await asyncio.wait({ending, *troubles}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return current.last_words or describe_exit(ending.result())
            end = next(one.result() for one in troubles if one.done())
            await current.kill()
            return current.last_words or end
        finally:
            for task in (ending, *troubles):
                task.cancel()

    async def _restart(self, client: AsyncEngineClient, end: str) -> None:
        while True:
            now = time.monotonic()
            if len(self._ends) == MAX_RESTARTS and now - self._ends[0] < RESTART_WINDOW:
                raise Temporary(f"the scheduler process {end}; {MAX_RESTARTS} restarts have not helped, giving up")
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
        current = self._current
        if current is not None:
            # Forgotten only afterwards: where this is cancelled, the next call goes on with it.
            await current.stop()
            self._current = None


def _environment() -> dict[str, str]:
    """Return this process's, without its config: that comes through the pipe, and keys not at all."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(ENV_PREFIX) and not (name.startswith("PEGBOARD_") and is_secret(name))
    }


def describe_exit(code: int) -> str:
    """Return how a process ended, for a sentence that begins with it."""
    if code < 0:
        hint = " (the kernel kills so when memory runs out)" if code == -9 else ""
        return f"was ended by signal {-code}{hint}"
    return f"exited with code {code}"


def _ready(messages: list[FromScheduler]) -> Ready:
    first = messages[0]
    if isinstance(first, StartFailed):
        raise Temporary(first.message) if first.temporary else PegboardError(first.message)
    if not isinstance(first, Ready):
        raise PegboardError(f"the scheduler process began with {type(first).__name__} instead of Ready")
    return first
