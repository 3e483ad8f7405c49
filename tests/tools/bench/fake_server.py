"""A server with OpenAI's API whose delays and faults are known. It runs in a thread, with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class FakeServer:
    """What it does with a request; all may be changed while it runs."""

    first_s: float = 0.0
    """Until the first piece."""
    piece_s: float = 0.0
    """Between two pieces."""
    service_s: float = 0.0
    """What a request takes of the one thing there is: requests queue for it, before their first piece."""
    tokens_per_piece: int = 1
    usage: bool = True
    cached: int | None = None
    takes_tokens: bool = True
    stops: bool = False
    """Answers end of themselves, not for their length."""
    prompt_tokens: int | None = None
    """What it says that every prompt has."""
    refuses: frozenset[str] = frozenset()
    """Fields that it does not know."""
    status: int = 200
    fail_every: int = 0
    """Every so manieth request gets a 503."""
    break_after: int | None = None
    """Closes the connection after so many pieces."""
    error_event: bool = False
    hang_from: int | None = None
    """From this request on nobody gets an answer."""
    models: bool = True
    starting: int = 0
    """So many questions are answered with 503: it is loading."""
    counters: tuple[str, str] | None = None
    """Names of metrics that count what was found in the cache, and all."""
    seen: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of the requests for answers."""
    connections: int = 0
    most_at_once: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __post_init__(self) -> None:
        self._at_once = 0
        self._lock: asyncio.Lock | None = None
        self._count = 0
        # Kept: the loop knows tasks that wait by weak references only.
        self._never = asyncio.Event()
        self.close: Callable[[], None] = lambda: None
        """Ends it, with all its connections."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                length = next(
                    (
                        int(v)
                        for k, _, v in (x.partition(": ") for x in head.split("\r\n"))
                        if k.lower() == "content-length"
                    )
                )
                data = await reader.readexactly(length)
                if not await self._answer(method, path, data, writer):
                    break

    async def _answer(self, method: str, path: str, data: bytes, writer: asyncio.StreamWriter) -> bool:
        if path == "/v1/models" and self.starting:
            self.starting -= 1
            return _json(writer, 503, {"error": {"message": "loading"}})
        if path == "/v1/models" and self.models:
            return _json(writer, 200, {"object": "list", "data": [{"id": "fake"}]})
        if path == "/metrics" and self.counters is not None:
            hits, queries = self.counters
            lines = f'# TYPE {hits} counter\n{hits}{{model="a"}} {25 * self._count}\n{queries} {1e2 * self._count}\n'
            return _send(writer, 200, lines.encode(), "text/plain")
        if method != "POST" or not path.startswith("/v1/"):
            return _json(writer, 404, {"detail": "Not Found"})
        body = json.loads(data)
        self._count += 1
        if unknown := sorted(self.refuses & body.keys()):
            return _json(writer, 400, {"error": {"message": f"Unrecognized request argument supplied: {unknown[0]}"}})
        if not self.takes_tokens and isinstance(body.get("prompt"), list):
            return _json(writer, 422, {"detail": [{"msg": "prompt: Input should be a valid string"}]})
        if self.status != 200 or (self.fail_every and self._count % self.fail_every == 0):
            return _json(
                writer, self.status if self.status != 200 else 503, {"error": {"message": "the queue is full"}}
            )
        self.seen.append(body)
        if self.hang_from is not None and self._count >= self.hang_from:
            await self._never.wait()
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self._stream(path, body, writer)
        finally:
            self._at_once -= 1

    async def _stream(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM)
        pieces = 0
        async for event in self._events(path, body):
            if self.break_after is not None and pieces >= self.break_after:
                return False
            pieces += 1
            text = b"data: " + event + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(text), text))
            await writer.drain()
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        return True

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        if self.service_s:
            if self._lock is None:
                self._lock = asyncio.Lock()
            async with self._lock:
                await asyncio.sleep(self.service_s)
        await asyncio.sleep(self.first_s)
        if self.error_event:
            yield json.dumps({"error": {"message": "out of memory"}}).encode()
            return
        count, sent = body["max_tokens"], 0
        chat = path.endswith("/chat/completions")
        if chat:
            yield json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}).encode()
        while sent < count:
            if sent:
                await asyncio.sleep(self.piece_s)
            sent = min(count, sent + self.tokens_per_piece)
            what = {"delta": {"content": " a"}} if chat else {"text": " a"}
            reason = ("stop" if self.stops else "length") if sent == count else None
            yield json.dumps({"choices": [{"index": 0, **what, "finish_reason": reason}], "usage": None}).encode()
        if self.usage and body.get("stream_options", {}).get("include_usage"):
            tokens = self.prompt_tokens or _prompt_tokens(body)
            usage = {"prompt_tokens": tokens, "completion_tokens": count}
            details = {} if self.cached is None else {"prompt_tokens_details": {"cached_tokens": self.cached}}
            yield json.dumps({"choices": [], "usage": {**usage, **details}}).encode()


def _prompt_tokens(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    text = prompt if prompt is not None else " ".join(_words(one["content"]) for one in body["messages"])
    return len(text.split())


def _words(content: str | list[dict[str, Any]]) -> str:
    """What a message says, beside its pictures."""
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if part["type"] == "text")


def _json(writer: asyncio.StreamWriter, status: int, body: Any) -> bool:
    return _send(writer, status, json.dumps(body).encode(), "application/json")


def _send(writer: asyncio.StreamWriter, status: int, data: bytes, kind: str) -> bool:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\nserver: fake\r\n\r\n"
    writer.write(head.encode() + data)
    return True


@contextlib.contextmanager
def fake_server(**settings: Any) -> Iterator[FakeServer]:
    """One that runs until the block ends."""
    fake = FakeServer(**settings)
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        fake.port = server.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    ready.wait()
    fake.close = lambda: loop.call_soon_threadsafe(stop.set) and None  # type: ignore[assignment, truthy-bool]
    try:
        yield fake
    finally:
        fake.close()
        thread.join()
        loop.close()


if __name__ == "__main__":
    import sys

    with fake_server(**json.loads(sys.argv[1])) as server:
        print(server.url, flush=True)  # noqa: T201
        sys.stdin.read()
