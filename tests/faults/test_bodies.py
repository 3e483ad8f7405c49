"""What request bodies may cost everybody else: time, memory and room.

The budget and the weight by themselves: tests/plugins/http_guard/test_body_budget.py and
tests/toolkit/parsing/test_json_weight.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import pkgutil
import socket
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.hostile.clients import OPEN
from benchmarks.hostile.measure import Client, Memory
from pegboard.conformance.asgi import Exchange
from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.http.bodies import parse_body
from pegboard.toolkit.http.events import until_disconnect
from pegboard.toolkit.http.limits import PLAIN_BODY
from tests.core.server.api_server import Server, running, wait_for
from tests.faults.whole_api import questions, whole_app

logger = logging.getLogger(__name__)

MIB = 2**20
LARGEST = 16 * MIB
SENDERS = 4
PATIENCE_S = 60
"""After which a test counts what it waits for as never happening."""
TAKES_PROMPTS = {
    "/generate", "/encode", "/classify",
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages",
    "/v1/messages/count_tokens", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/score", "/v1/score",
    "/rerank", "/v1/rerank", "/pooling", "/v1/pooling", "/v1/chat/completions/render", "/invocations",
    "/v1/responses/input_tokens", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_tokenizer(directory)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").touch()
    return directory


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(model, tmp_path_factory.mktemp("server"), max_body_bytes=LARGEST) as one:
        one.started()
        one.generate(sampling_params={"max_new_tokens": 1})
        yield one
        assert "Traceback" not in one.log, one.log


def memory(server: Server) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


class Beside:
    """Asks a server for its health from a process of its own while a block runs, and notes the most memory. The slowest
    answer goes to the log alone: how long it takes depends on what else the machine does.
    """

    def __init__(self, server: Server) -> None:
        self._health = Client("health", server.url)
        self._memory = Memory(psutil.Process(server.process.pid))
        self.memory = 0

    def __enter__(self) -> Beside:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._health)
            self._health.wait_ready()
            stack.enter_context(self._memory)
            self._health.tell()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            asked = self._health.result()["asked"]
            self.memory = self._memory.peaks()["api"]
        assert {status for *_, status in asked} <= {200, OPEN}
        slowest = max(seconds for _, seconds, _ in asked)
        logger.info("the slowest health: %.3f s, memory %d MiB", slowest, self.memory // MIB)


def send_all(server: Server, path: str, body: bytes) -> list[httpx.Response]:
    """The answers to SENDERS that send it at once."""

    def send(_: int) -> httpx.Response:
        return httpx.post(server.url + path, content=body, timeout=60)

    with ThreadPoolExecutor(SENDERS) as pool:
        return list(pool.map(send, range(SENDERS)))


def code(answer: httpx.Response | Exchange) -> str:
    return str(answer.json()["error"]["code"])


# ---- values ----------------------------------------------------------------------------------------------------------

EMPTY = b'{"messages": [' + b"{}," * (LARGEST // 3 - 10) + b"{}]}"
"""The most values in the fewest bytes."""


def test_four_senders_of_empty_objects_are_refused(server: Server) -> None:
    """Before, this took 1.7 GB and froze everything for seven seconds."""
    with Beside(server) as beside:
        answers = send_all(server, "/v1/chat/completions", EMPTY)
    assert [(one.status_code, code(one)) for one in answers] == [(413, "too_many_values")] * SENDERS
    assert beside.memory < 200 * MIB


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt": [' + b"54321," * 1_000_000 + b"1]}"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "' + b"word " * 3_000_000 + b'"}, 5]}'),
    ],
    ids=["values", "bytes"],
)
def test_the_heaviest_bodies_are_parsed_in_turn_and_their_memory_returns(
    server: Server, path: str, body: bytes
) -> None:
    before = memory(server)
    with Beside(server) as beside:
        answers = send_all(server, path, body)
    assert {one.status_code for one in answers} == {400}
    assert beside.memory < 400 * MIB
    wait_for(lambda: memory(server) < before + 30 * MIB)


class Parses:
    """Stands in for the parser of bodies. Each parse lasts until the server has answered for its health meanwhile, so
    one on the event loop would never end.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        where = f"{parse_body.__module__}.validate_body"
        self._parse = pkgutil.resolve_name(where)
        self._lock = threading.Lock()
        self._healthy = threading.Event()
        self._busy = self.most_at_once = self.count = 0
        monkeypatch.setattr(where, self._watched)

    def answered(self) -> None:
        """The server has answered for its health."""
        self._healthy.set()

    def _watched(self, data: bytes, model: Any) -> Any:
        with self._lock:
            self.count += 1
            self._busy += 1
            self.most_at_once = max(self.most_at_once, self._busy)
            self._healthy.clear()
        try:
            assert self._healthy.wait(PATIENCE_S), "no answer for the server's health while a body was parsed"
            return self._parse(data, model)
        finally:
            with self._lock:
                self._busy -= 1


@pytest.mark.parametrize(
    ("path", "body", "status", "parses"),
    [
        ("/v1/completions", b'{"prompt": [' + b"54321," * 20_000 + b'"x"]}', 400, SENDERS),
        ("/v1/chat/completions", EMPTY, 413, 0),
    ],
    ids=["heavy", "empty"],
)
def test_health_is_answered_while_bodies_are_parsed_one_by_one(
    path: str, body: bytes, status: int, parses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Parses(monkeypatch)

    async def scene() -> list[int | None]:
        app = whole_app(max_body_bytes=LARGEST)
        sent = asyncio.gather(*(Exchange(app, "POST", path, body).end() for _ in range(SENDERS)))
        while not sent.done():
            assert (await Exchange(app, "GET", "/health").end()).status == 200
            watched.answered()
            await asyncio.sleep(0)
        return [one.status for one in await sent]

    assert asyncio.run(scene()) == [status] * SENDERS
    assert (watched.count, watched.most_at_once) == (parses, min(parses, 1))


def post(body: bytes, path: str = "/v1/chat/completions", **bounds: int) -> Exchange:
    async def scene() -> Exchange:
        return await Exchange(whole_app(**bounds), "POST", path, body).end()  # type: ignore[arg-type]

    return asyncio.run(scene())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/generate"])
def test_values_are_counted_before_they_are_made(path: str) -> None:
    body = b'{"x": [' + b'{"a":[]},' * 200_000 + b"{}]}"

    async def scene() -> tuple[Exchange, int]:
        app = whole_app()
        tracemalloc.start()
        try:
            return await Exchange(app, "POST", path, body).end(), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    answer, peak = asyncio.run(scene())
    assert answer.status == 413
    assert "max_body_values" in answer.body.decode()
    # The pieces of one body that comes all at once; its values would take 100 MiB.
    assert peak < 30 * MIB


@pytest.mark.parametrize("exact", [True, False])
def test_the_bound_is_the_configs(exact: bool) -> None:
    # Two lists, nine commas, and an object with a name.
    body = json.dumps({"x": [[0] * 10], "pad": "[,{:" * 20_000}).encode()
    weight = 2 * 8 + 9 + 8 + 1 + 2 * (4 + 4) + 4
    assert post(body, max_body_values=weight - (not exact)).status == (400 if exact else 413)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [5] * 131_072, "max_tokens": 1},
        {"prompt": [[5] * 1000] * 500, "max_tokens": 1},
        {"prompt": "1,2,{3}:[4] " * 80_000, "max_tokens": 1},
        {"prompt": 'an "escaped\\" {text}, of: [things] ' * 50_000, "max_tokens": 1},
    ],
    ids=["ids", "batch", "figures", "quotes"],
)
def test_honest_bodies_pass(body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    assert len(data) > 256 * 1024
    assert post(data, "/v1/completions").status == 200


def test_json_inside_of_strings_is_counted_too() -> None:
    arguments = '{"a": [' + "{}," * 1_000_000 + "{}]}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    answer = post(json.dumps({"messages": messages}).encode())
    assert (answer.status, code(answer)) == (400, "too_many_values")
    answer = post(json.dumps({"text": "hi", "sampling_params": {"json_schema": arguments}}).encode(), "/generate")
    assert (answer.status, code(answer)) == (400, "too_many_values")


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_nesting_is_malformed(opening: bytes) -> None:
    for depth in (201, 5000, 60_000):
        answer = post(b'{"messages":' + opening * depth)
        assert (answer.status, code(answer)) == (400, "malformed_json")


# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_routes_that_take_no_prompts_take_small_bodies() -> None:
    async def scene() -> dict[str, int | None]:
        app = whole_app()
        body = b" " * (PLAIN_BODY + 1)
        return {
            path: (await Exchange(app, "POST", path, body).end()).status
            for method, path, _ in questions(app)
            if method == "POST"
        }

    statuses = asyncio.run(scene())
    assert set(statuses) > TAKES_PROMPTS
    assert {path for path, status in statuses.items() if status != 413} == TAKES_PROMPTS


def announce(server: Server, path: str, size: int, sent: int) -> socket.socket:
    """A connection on which this much of a request's body has been sent."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode())
    connection.sendall(b'{"text": "' + b"x" * (sent - 10))
    return connection


@pytest.fixture(scope="module")
def narrow(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Room for a megabyte of bodies."""
    directory = tmp_path_factory.mktemp("narrow")
    with running(model, directory, max_body_bytes=LARGEST, max_bodies_bytes=MIB) as one:
        yield one.started()
        assert "Traceback" not in one.log, one.log


def test_bodies_that_never_end_leave_room_for_others(narrow: Server) -> None:
    """They have filled the room together; small bodies need none, and a large one at a time goes beyond."""
    before = memory(narrow)
    endless = [announce(narrow, "/generate", LARGEST, 500_000) for _ in range(2)]
    more = [announce(narrow, "/generate", LARGEST, 40_000) for _ in range(20)]
    assert narrow.generate(sampling_params={"max_new_tokens": 1}).status_code == 200
    large = {"input_ids": [5] * 90_000, "x" * 500_000: 1, "sampling_params": {"max_new_tokens": 1}}
    answers = send_all(narrow, "/generate", json.dumps(large).encode())
    assert [one.status_code for one in answers] == [200] * SENDERS
    assert memory(narrow) < before + 40 * MIB
    for connection in [*endless, *more]:
        connection.close()


def test_bodies_hold_no_room_while_their_answers_are_made(narrow: Server) -> None:
    """Each takes more than all may, since one character makes its text four times as large. Before, the second one was
    refused after 10 s, because the first one was still being answered.
    """
    body = json.dumps(
        {"text": "hi", "x": "a" * 300_000 + "😀", "stream": True, "sampling_params": {"max_new_tokens": 50_000}},
        ensure_ascii=False,
    ).encode()
    with contextlib.ExitStack() as stack:
        answers = [stack.enter_context(narrow.client.stream("POST", "/generate", content=body)) for _ in range(4)]
        assert [one.status_code for one in answers] == [200] * 4
        for one in answers:
            assert next(one.iter_lines()).startswith("data: {")


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_what_the_engine_refuses_is_forgotten_at_once() -> None:
    """An exception that knew its own frame would keep the whole request until the garbage collector comes."""

    class Body:
        """What a route has read."""

    async def refuses() -> None:
        raise InvalidRequest("the prompt is too long")

    class Request:
        async def receive(self) -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

    async def route(kept: list[weakref.ref[Body]]) -> None:
        body = Body()
        kept.append(weakref.ref(body))
        await until_disconnect(Request(), refuses())  # type: ignore[arg-type]

    async def scene() -> None:
        kept: list[weakref.ref[Body]] = []
        with pytest.raises(InvalidRequest):
            await route(kept)
        await asyncio.sleep(0)
        assert kept[0]() is None

    gc.disable()
    try:
        asyncio.run(scene())
    finally:
        gc.enable()
