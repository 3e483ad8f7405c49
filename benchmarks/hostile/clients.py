"""The clients, each kind in a process of its own, so that none of them holds up another:

    python -m benchmarks.hostile.clients health URL
    python -m benchmarks.hostile.clients streams URL --clients 8
    python -m benchmarks.hostile.clients grammars URL
    python -m benchmarks.hostile.clients pictures URL
    python -m benchmarks.hostile.clients attack URL --name NAME --client 0 --seconds 20

A process says `ready` on standard output, begins with the line `go` on standard input, and ends with the next line, or
by itself; then it says what it has seen, as one line of JSON. Times are of time.perf_counter(), which all processes of
a machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.hostile import media, payloads
from benchmarks.hostile.attacks import ATTACKS, Attack
from benchmarks.hostile.payloads import Ask
from pegboard.tools.bench.connection import Address, HttpClient, RequestFailed
from pegboard.tools.bench.events import EventSplitter

HEALTH_EVERY = 0.05
OPEN = -1
"""In place of a status: not answered when the client was asked to end."""
KEPT_BYTES = 2048
"""Of an answer: enough for an error."""
TOO_LARGE = frozenset({"413", "request_too_costly", "batch_too_large", "context_length_exceeded"})
"""A status or a code, of which an answer says that less would be taken."""
SMALLEST = 1 / 64
"""The least part of an attack that is tried where more is refused."""
MAX_NICE = 10
"""Attackers would not share the server's processors."""


class Answer:
    """Reads an answer and forgets it, but for its status, its beginning and when its bytes came."""

    def __init__(self) -> None:
        self.status = 0
        self.size = 0
        self.start = b""
        self.begun = asyncio.Event()

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.begun.set()

    def body(self, data: bytes, now: float) -> None:
        self.size += len(data)
        if len(self.start) < KEPT_BYTES:
            self.start += data[: KEPT_BYTES - len(self.start)]

    @property
    def outcome(self) -> str:
        """Status, and the code of an error."""
        if self.status == 200:
            return "200"
        return f"{self.status} {code_of(self.start)}".strip()


def code_of(body: bytes) -> str:
    """Return the code of an error's body, in OpenAI's or Anthropic's shape."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or error.get("type") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return ""


# ---- health ---------------------------------------------------------------------------------------------------------


class Health:
    """Asks /health every 50 ms, each time over a new connection, whether or not the one before has been answered."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._asked: list[list[float]] = []
        """When, how many seconds until the answer (-1 until then), and its status: 0 for none."""
        self._lag = 0.0

    async def run(self) -> None:
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._ask())
                due += HEALTH_EVERY
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                late = time.perf_counter() - due
                self._lag = max(self._lag, late)
                if late > HEALTH_EVERY:
                    due = time.perf_counter()

    async def _ask(self) -> None:
        one = [time.perf_counter(), -1.0, 0]
        self._asked.append(one)
        client, answer = HttpClient(self._address), Answer()
        try:
            await client.send(client.request("GET", "/health"), answer)
        except RequestFailed:
            pass
        finally:
            client.close()
            one[1:] = [time.perf_counter() - one[0], answer.status]

    def result(self) -> dict[str, Any]:
        now = time.perf_counter()
        asked = [(at, seconds, status) if seconds >= 0 else (at, now - at, OPEN) for at, seconds, status in self._asked]
        return {"asked": asked, "lag": self._lag}


# ---- honest streams -------------------------------------------------------------------------------------------------


class _Stream(Answer):
    """Notes the gaps of a stream, and keeps its last event."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams
        self._splitter = EventSplitter()
        self.sent = self.touched = time.perf_counter()
        self.events: list[bytes] = []
        self.speaks = False

    def body(self, data: bytes, now: float) -> None:
        super().body(data, now)
        if self.status != 200:
            return
        events = list(self._splitter.feed(data))
        self.events = [*self.events[-1:], *events][-3:]
        if not self.speaks:
            # A chat says at once who speaks, and then waits for its turn.
            if all(b'"role"' in one for one in events):
                return
            self.speaks = True
            self._streams.firsts.append((now, now - self.touched))
        else:
            self._streams.gaps.append((now, now - self.touched))
        self.touched = now


class Streams:
    """Clients that each stream one answer after the other, in turn of the native API and of chat completions. With
    `short` prompts for a model that has little context and few words.
    """

    def __init__(self, address: Address, clients: int, short: bool = False) -> None:
        self._address = address
        self._clients = clients
        self._short = short
        self.gaps: list[tuple[float, float]] = []
        """When one ended, and its seconds."""
        self.firsts: list[tuple[float, float]] = []
        """The same, from a request to its first event."""
        self._ended: list[dict[str, Any]] = []
        self._open: dict[int, _Stream] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        rng = random.Random(number)
        native = number % 2 == 0
        # Not all at the same time.
        await asyncio.sleep(0.2 * number)
        while True:
            client = HttpClient(self._address)
            self._open[number] = stream = _Stream(self)
            one = _honest(rng, native, self._short)
            try:
                await client.send(client.request("POST", one.path, one.body), stream)
                end = _end_of(stream, native)
            except RequestFailed as error:
                end = {"outcome": f"broken off: {error}" if stream.events else f"no answer: {error}"}
            finally:
                client.close()
            del self._open[number]
            self._ended.append({"at": time.perf_counter(), "api": "native" if native else "chat", **end})
            if end["outcome"] != "200":
                await asyncio.sleep(0.5)

    def result(self) -> dict[str, Any]:
        now = time.perf_counter()
        silent = [now - one.touched for one in self._open.values() if one.speaks]
        waiting = [now - one.touched for one in self._open.values() if not one.speaks]
        more = {"silent": silent, "waiting": waiting}
        return {"gaps": self.gaps, "firsts": self.firsts, "ended": self._ended, **more}


def _honest(rng: random.Random, native: bool, short: bool) -> Ask:
    words = rng.randint(60, 160)
    prompt, tokens = payloads.prose(rng, words // 8 if short else words), rng.randint(64, 256)
    # A small model says little else than special tokens.
    shown = {"skip_special_tokens": False} if short else {}
    if native:
        return payloads.generate(prompt, {"max_new_tokens": tokens, "temperature": 0.7, **shown}, stream=True)
    return payloads.ask(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
        **shown,
    )


def _end_of(stream: _Stream, native: bool) -> dict[str, Any]:
    """Return what became of a stream: its outcome, and of the native API's how many tokens were counted and sent."""
    if stream.status != 200:
        return {"outcome": stream.outcome}
    events = [json.loads(one) for one in stream.events if one != b"[DONE]"]
    if not events or stream.events[-1] != b"[DONE]":
        return {"outcome": "no end"}
    if "error" in events[-1]:
        return {"outcome": f"error {events[-1]['error'].get('code')}"}
    if not native:
        return {"outcome": "200" if events[-1].get("usage") else "no end"}
    meta = events[-1]["meta_info"]
    reason = meta["finish_reason"]
    outcome = "200" if reason and reason["type"] in ("length", "stop") else f"ended: {reason}"
    return {"outcome": outcome, "counted": meta["completion_tokens"], "sent": len(events[-1]["output_ids"])}


class OneByOne:
    """A client that asks again and again: with a small grammar that the server does not know yet, or about a small
    picture.
    """

    def __init__(self, address: Address, ask: Callable[[random.Random], Ask]) -> None:
        self._address = address
        self._ask = ask
        self._asked: list[tuple[float, float, str]] = []
        self._began = 0.0
        """When the one that is under way was asked."""

    async def run(self) -> None:
        rng = random.Random()
        while True:
            one = self._ask(rng)
            self._began = time.perf_counter()
            outcome = await _whole(self._address, one)
            self._asked.append((self._began, time.perf_counter() - self._began, outcome))
            self._began = 0.0
            await asyncio.sleep(0.3)

    def result(self) -> dict[str, Any]:
        waiting = [(self._began, time.perf_counter() - self._began, "open")] if self._began else []
        return {"asked": [*self._asked, *waiting]}


BESIDE: dict[str, Callable[[random.Random], Ask]] = {
    "grammars": lambda rng: payloads.quick_grammar(rng.randrange(10**9)),
    "pictures": media.honest,
}
"""What honest clients ask beside an attack, by their kind."""


# ---- attackers ------------------------------------------------------------------------------------------------------


async def _whole(address: Address, one: Ask) -> str:
    """Send a request, read its answer to the end, and say what it was."""
    client, answer = HttpClient(address), Answer()
    try:
        await client.send(client.request("POST", one.path, one.body), answer)
        return answer.outcome
    except RequestFailed as error:
        return f"{answer.outcome} broken off" if answer.status else f"no answer: {error}"
    finally:
        client.close()


class Attacker:
    """One client of an attack."""

    def __init__(self, address: Address, attack: Attack, client: int, seconds: float) -> None:
        self._address = address
        self._attack = attack
        self._seconds = seconds
        self._rng = random.Random(1000 + client)
        self._scale = 1.0
        self._asks: Iterator[Ask] = attack.endless(self._rng)
        self._sent = 0
        self._outcomes: dict[str, int] = {}
        self._slowest = 0.0

    async def run(self) -> None:
        end = time.perf_counter() + self._seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(self._attack.at_once if not self._attack.idle else 0):
                group.create_task(self._one_by_one(end))
            for number in range(self._attack.idle):
                group.create_task(self._idle(end, number))

    async def _one_by_one(self, end: float) -> None:
        while time.perf_counter() < end:
            began = time.perf_counter()
            outcome = await self._one()
            self._slowest = max(self._slowest, time.perf_counter() - began)
            if outcome != "200":
                await asyncio.sleep(min(self._attack.pause, max(0.0, end - time.perf_counter())))

    async def _one(self) -> str:
        self._sent += 1
        one, scale = next(self._asks), self._scale
        if self._attack.leave_after is None:
            outcome = await _whole(self._address, one)
        else:
            outcome = await self._leave(one, self._attack.leave_after)
        if not TOO_LARGE.isdisjoint(outcome.split()) and scale == self._scale and scale > SMALLEST:
            self._scale /= 2
            self._asks = self._attack.endless(self._rng, self._scale)
        said = outcome if scale == 1 else f"{outcome} at 1/{round(1 / scale)}"
        self._outcomes[said] = self._outcomes.get(said, 0) + 1
        return outcome

    async def _leave(self, one: Ask, seconds: float) -> str:
        client, answer = HttpClient(self._address), Answer()
        try:
            async with asyncio.timeout(seconds):
                await client.send(client.request("POST", one.path, one.body), answer)
            return answer.outcome
        except TimeoutError:
            return "200, left" if answer.status == 200 else "left without an answer"
        except RequestFailed as error:
            return f"no answer: {error}"
        finally:
            client.close()

    async def _idle(self, end: float, number: int) -> None:
        """One connection, opened again when it is closed."""
        # About 250 connections per second and client.
        await asyncio.sleep(number / 250)
        while time.perf_counter() < end:
            self._sent += 1
            outcome = await self._opened(end)
            self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1
            await asyncio.sleep(2.0)

    async def _opened(self, end: float) -> str:
        writer = None
        try:
            reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
            writer.write(f"GET /health HTTP/1.1\r\nhost: {self._address.authority}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            status = head.split(b" ", 2)[1].decode()
            if status != "200":
                return status
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, end - time.perf_counter())):
                    await reader.read(-1)
                return "200, closed by the server"
            return "200"
        except (OSError, asyncio.IncompleteReadError) as error:
            # That is this client's own doing, and no answer of the server's.
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                return "not sent: no file left (ulimit -Hn)"
            return "no answer"
        finally:
            if writer is not None:
                writer.transport.abort()

    def result(self) -> dict[str, Any]:
        return {"sent": self._sent, "outcomes": self._outcomes, "slowest": self._slowest}


# ---- processes ------------------------------------------------------------------------------------------------------


async def obey(client: Health | Streams | OneByOne | Attacker) -> None:
    """Run a client between the lines of standard input."""
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    running = asyncio.ensure_future(client.run())
    told = loop.run_in_executor(None, sys.stdin.readline)
    await asyncio.wait({running, told}, return_when=asyncio.FIRST_COMPLETED)
    result = client.result()
    failed = running.done() and running.exception()
    running.cancel()
    await asyncio.wait({running})
    print(json.dumps({**result, **({"failed": repr(failed)} if failed else {})}), flush=True)
    # A thread that waits for a line would keep the process.
    sys.stdout.flush()
    os._exit(0)


def allow_files() -> None:
    """Every connection is an open file, and the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("health", "streams", *BESIDE, "attack"))
    parser.add_argument("url", type=Address.parse)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--name", choices=ATTACKS)
    parser.add_argument("--client", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args(words)
    allow_files()
    client: Health | Streams | OneByOne | Attacker
    if args.kind == "health":
        client = Health(args.url)
    elif args.kind == "streams":
        client = Streams(args.url, args.clients, args.short)
    elif args.kind in BESIDE:
        client = OneByOne(args.url, BESIDE[args.kind])
    else:
        with contextlib.suppress(OSError):
            os.nice(MAX_NICE)
        client = Attacker(args.url, ATTACKS[args.name], args.client, args.seconds)
    asyncio.run(obey(client))


if __name__ == "__main__":
    main()
