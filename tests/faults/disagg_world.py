"""A prefill and a decode server with an unreliable network between them, and what is asked of both at once.

All of them are processes of their own, as in production. Decode finds prefill at another address of loopback, where
links listen that may be slow, deaf, broken, or lead to another server. A spare prefill server, which decode reaches
without links, shows that others are served meanwhile, and answers alone, so that it is known what is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from pegboard.conformance.servers import Served, free_ports, serving
from tests.faults.slow_link import SlowLink
from tests.faults.test_served_faults import schedulers_of
from tests.faults.tiers_kill import kill

PREFILL, DECODE = "prefill", "decode"
AWAY = "127.0.0.2"
"""Where decode finds the prefill server: the links' address."""
TIMES = {"hold": 5.0, "grace": 1.0, "ping": 1.0, "timeout": 10.0, "connect_timeout": 3.0}
POOL = 8192
LONG, SHORT = 2500, 60
"""Tokens of prompts: one at a time fits half of the pool, which is what prefill keeps for others."""
CLEAR = 2e-4
"""How far the runner-up is behind, in logprobs, for each token of an answer."""
PATIENCE = 60.0
EMPTY_WITHIN = 15.0
LEFT = (
    *("blocked_requests", "held_requests", "seated_requests", "quarantined_tokens"),
    *("running_requests", "waiting_requests", "held_tokens", "locked_tokens"),
)
FAULTS = ("book_errors", "failed_batches", "plugin_failures")


class Wrong(Exception):
    """The servers have done what they must not do."""


@dataclass
class Server:
    """A server that can be killed, stopped, and started again at the same ports."""

    config: Mapping[str, Any]
    bootstrap: int = 0
    data: int = 0
    served: Served = field(init=False)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _stopped: list[psutil.Process] = field(default_factory=list)
    alive: bool = False
    begins: bool = False
    """Whether its scheduler was killed, and is being replaced."""
    replaced: int = 0
    """How often that has happened. A server gives up after a few times within ten minutes."""

    @classmethod
    def of(cls, model: Path, role: str, transfer: Mapping[str, Any] | None = None, **options: Any) -> Server:
        """Return a server that has not been started yet. `options` are further ones of its gate; `transfer` is another
        engine than `tcp`.
        """
        bootstrap, data = free_ports(2)
        gate: dict[str, Any] = {"use": "disagg", "role": role, **TIMES, **options}
        if role == PREFILL:
            gate["listen"] = f"127.0.0.1:{bootstrap}"
        config = {
            "model": {"path": str(model), "dtype": "float32", "context_length": 4096},
            "memory": {"max_total_tokens": POOL},
            "attention": {"use": "torch"},
            "scheduler": {"max_running_requests": 32, "chunked_prefill_size": 64, "watchdog_timeout": 30},
            "gates": [gate],
            "kv_transfer": transfer or {"use": "tcp", "listen_port": data},
        }
        return cls(config, bootstrap, data)

    @property
    def address(self) -> str:
        return self.served.address

    @property
    def pid(self) -> int:
        return self.served.process.pid

    @property
    def scheduler(self) -> psutil.Process:
        (found,) = schedulers_of(self.served)
        return found

    def start(self) -> None:
        self.served = self._stack.enter_context(serving(self.config, env={**os.environ, "OMP_NUM_THREADS": "1"}))
        self.alive, self.begins, self.replaced = True, False, 0

    def lost(self, error: httpx.HTTPError) -> Wrong:
        """Return what an error of a connection to it says, with whether it runs, and the end of its log."""
        code = self.served.process.poll()
        ended = "it runs" if code is None else f"it has ended with {code}"
        return Wrong(f"{self.address}: {error!r}; {ended}:\n{self.served.log()[-4000:]}")

    def close(self) -> None:
        self.go_on()
        if self.alive and "Traceback" in self.served.log():
            raise Wrong(self.served.log())
        self._stack.close()
        self.alive = False

    def kill(self) -> None:
        """End all of its processes."""
        kill(self.served)
        self.alive = False

    def kill_scheduler(self) -> None:
        """End the process that has the model, which the server replaces."""
        self.scheduler.kill()
        self.begins, self.replaced = True, self.replaced + 1

    def stop(self) -> None:
        """Stop all of its processes, until `go_on`."""
        parent = psutil.Process(self.pid)
        self._stopped = [parent, *parent.children(recursive=True)]
        for one in self._stopped:
            one.suspend()

    def go_on(self) -> None:
        for one in self._stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.resume()
        self._stopped = []


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the right answer to it."""

    ids: list[int]
    answer: list[int]

    def salted(self, salt: str) -> dict[str, Any]:
        """A body that asks for it; `salt` parts its KV from that of others."""
        sampling = {"temperature": 0, "max_new_tokens": len(self.answer), "ignore_eos": True}
        return {"input_ids": self.ids, "sampling_params": sampling, "cache_salt": salt}


@dataclass(frozen=True)
class Answer:
    """What one server says. Status 0: the connection broke; -1: the client left."""

    status: int
    at: float
    ids: tuple[int, ...] = ()
    code: str = ""

    def __str__(self) -> str:
        return {0: "broken", -1: "left"}.get(self.status, f"{self.status} {self.code}".strip())


class Sent:
    """A request under way on one server or on both."""

    def __init__(self, prompt: Prompt, tasks: Mapping[str, asyncio.Task[Answer]]) -> None:
        self.prompt = prompt
        self.tasks = tasks

    async def answer(self, side: str) -> Answer:
        """Wait for a server's answer. Raises Wrong where it does not come, or has wrong tokens."""
        if side not in self.tasks:
            return Answer(-1, 0.0)
        try:
            async with asyncio.timeout(PATIENCE):
                found = await self.tasks[side]
        except asyncio.CancelledError:
            return Answer(-1, time.monotonic())
        except TimeoutError:
            raise Wrong(f"{side} does not answer within {PATIENCE:g} s") from None
        wanted = self.prompt.answer[:1] if side == PREFILL else self.prompt.answer
        if found.status == 200 and list(found.ids) != wanted:
            raise Wrong(f"{side} answers {found.ids} instead of {wanted}")
        return found

    def leave(self, *sides: str) -> None:
        """Have clients go without having heard the answer."""
        for side in sides:
            self.tasks[side].cancel()


class World:
    """The servers, the links between them, and prompts."""

    def __init__(self, model: Path, transfer: Mapping[str, Any] | None = None, **decode: Any) -> None:
        """`decode` are options of the decode server's gate; `transfer` is another engine than `tcp`, without links."""
        self.prefill, self.spare = (Server.of(model, PREFILL, transfer) for _ in range(2))
        self.decode = Server.of(model, DECODE, transfer, peers=[AWAY, "127.0.0.1"], **decode)
        self.control = SlowLink(("127.0.0.1", self.prefill.bootstrap), (AWAY, 0))
        self.data = SlowLink(("127.0.0.1", self.prefill.data), (AWAY, self.prefill.data))
        self.spare_data = SlowLink(("127.0.0.1", self.spare.data), (AWAY, self.spare.data))
        self.rooms = itertools.count(1)
        self.long: Prompt
        """A prompt whose KV takes long on a slow link."""
        self.longest: Prompt
        """One with many tokens in its answer."""
        self.short: list[Prompt]
        self._draw = np.random.default_rng(19)
        self.client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def __aenter__(self) -> World:
        try:
            await self._begin()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _begin(self) -> None:
        servers = (self.prefill, self.spare, self.decode)
        await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
        self.long = await self.prompt(LONG, 16)
        self.longest = await self.prompt(SHORT, 2500)
        self.short = [await self.prompt(SHORT + number, 12) for number in range(8)]

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        for link in (self.control, self.data, self.spare_data):
            link.close()
        for server in (self.prefill, self.spare, self.decode):
            await asyncio.to_thread(server.close)

    async def prompt(self, length: int, new: int) -> Prompt:
        """Return a prompt in whose answer no token has a close runner-up."""
        while True:
            ids = self._draw.integers(3, 300, length).tolist()
            body = Prompt(ids, [0] * new).salted("reference")
            body |= {"return_logprob": True, "top_logprobs_num": 2}
            try:
                found = (await self.client.post(f"{self.spare.address}/generate", json=body)).raise_for_status().json()
            except httpx.HTTPError as error:
                raise self.spare.lost(error) from error
            tops = found["meta_info"]["output_top_logprobs"]
            if all(first[0] - second[0] > CLEAR for first, second in tops):
                return Prompt(ids, found["output_ids"])

    # ---- requests ---------------------------------------------------------------------------------------------------

    def send(self, prompt: Prompt, *, over: SlowLink | Server | None = None, bad: str = "", only: str = "") -> Sent:
        """Ask both servers, as a router does; `bad`: the side whose body is not valid. `over` leads to the prefill
        server: the link to the one, or the spare one. `only`: the other side is not asked.
        """
        room = next(self.rooms)
        over = over or self.control
        host, port = over.address if isinstance(over, SlowLink) else ("127.0.0.1", over.bootstrap)
        body = {**prompt.salted(str(room)), "bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
        servers = {PREFILL: self.spare if over is self.spare else self.prefill, DECODE: self.decode}
        asked = [(side, server) for side, server in servers.items() if only in ("", side)]
        sampling = {**body["sampling_params"], "temperature": -1}
        bodies = {side: {**body, "sampling_params": sampling} if side == bad else body for side, _ in asked}
        return Sent(prompt, {side: self._ask(server, bodies[side]) for side, server in asked})

    def plain(self, server: Server, prompt: Prompt) -> Sent:
        """Ask one server for all of it."""
        return Sent(prompt, {DECODE: self._ask(server, prompt.salted(f"plain {next(self.rooms)}"))})

    def _ask(self, server: Server, body: Mapping[str, Any]) -> asyncio.Task[Answer]:
        async def ask() -> Answer:
            try:
                answer = await self.client.post(f"{server.address}/generate", json=body)
            except httpx.HTTPError:
                return Answer(0, time.monotonic())
            found, now = answer.json(), time.monotonic()
            if answer.status_code == 200:
                return Answer(200, now, tuple(found["output_ids"]))
            return Answer(answer.status_code, now, code=str(found.get("error", {}).get("code") or ""))

        return asyncio.create_task(ask())

    # ---- what they say of themselves --------------------------------------------------------------------------------

    async def state(self, server: Server) -> dict[str, Any]:
        try:
            answer = await self.client.get(f"{server.address}/server_info", timeout=PATIENCE)
            return dict(answer.raise_for_status().json()["scheduler"])
        except httpx.HTTPError as error:
            raise server.lost(error) from error

    async def rooms_of(self, server: Server) -> dict[str, float]:
        return dict((await self.state(server))["gate_stats"]["disagg"])

    async def until(self, what: str, condition: Callable[[], Awaitable[bool]], seconds: float = PATIENCE) -> float:
        """Wait, and return for how long. Raises Wrong."""
        begun = time.monotonic()
        while not await condition():
            if time.monotonic() - begun > seconds:
                raise Wrong(f"{what}: it does not happen within {seconds:g} s")
            await asyncio.sleep(0.02)
        return time.monotonic() - begun

    async def left(self, server: Server) -> dict[str, float]:
        """What a server has left of requests."""
        now = await self.state(server)
        faults = {name: now[name] for name in FAULTS if now[name]}
        if faults:
            raise Wrong(f"{faults} {now['plugin_failures_by']}")
        found = {name: now[name] for name in LEFT if now[name]}
        rooms = now["gate_stats"]["disagg"]["rooms"]
        if now["free_tokens"] + now["cached_tokens_now"] != now["total_tokens"] and not found:
            raise Wrong(f"pages are lost: {now}")
        return found | ({"rooms": rooms} if rooms else {})

    async def empties(self, since: float) -> float:
        """Wait until nothing is left on the servers that live; return how long after `since`. Raises Wrong."""
        for server in (self.prefill, self.decode):
            while server.alive and not server.begins and (left := await self.left(server)):
                if time.monotonic() - since > EMPTY_WITHIN:
                    name = PREFILL if server is self.prefill else DECODE
                    raise Wrong(f"after {EMPTY_WITHIN:g} s {name} still has {left}")
                await asyncio.sleep(0.02)
        return time.monotonic() - since

    async def mend(self) -> None:
        """Bring everything back to where it was, and show that it works."""
        self.control.to = ("127.0.0.1", self.prefill.bootstrap)
        for link in (self.control, self.data, self.spare_data):
            link.deaf, link.rate = False, 0.0
        self.control.cut()
        for server in (self.prefill, self.decode):
            server.go_on()
            if server.replaced > 1:
                await asyncio.to_thread(server.close)
            if not server.alive:
                await asyncio.to_thread(server.start)
            await self.until("it serves", functools.partial(self.serves, server))
            server.begins = False
        probe = self.send(self.short[0])
        said = [await probe.answer(side) for side in (PREFILL, DECODE)]
        if [one.status for one in said] != [200, 200]:
            raise Wrong(f"afterwards a pair answers {', '.join(map(str, said))}")
        await self.empties(time.monotonic())

    async def told(self) -> str:
        """Return what both servers say of themselves now, and the ends of their logs."""
        found = []
        for server in (self.prefill, self.decode):
            try:
                answer = await self.client.get(f"{server.address}/server_info", timeout=5.0)
                said = str(answer.json().get("scheduler", answer.text))
            except (httpx.HTTPError, ValueError) as error:
                said = repr(error)
            found.append(f"{server.address}: {said}\n{server.served.log()[-3000:]}")
        return "\n".join(found)

    async def serves(self, server: Server) -> bool:
        try:
            return (await self.client.get(f"{server.address}/health_generate")).status_code == 200
        except httpx.HTTPError as error:
            raise server.lost(error) from error
