"""A real server with a tiny model, and what operators and clients do to it: signals, kills, stalls, crowds that leave.

What the API process alone can show stands in tests/core/server/test_serve.py, around a scheduler without a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENCE = 60.0
RUNNING = 4
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 3900}
SHORT = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


@contextlib.contextmanager
def served(model: Path, scratch: Path, queue: int | None = None, **server: Any) -> Iterator[Served]:
    """A server whose sockets lie in `scratch`, and where `queue` requests may wait."""
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "memory": {"max_total_tokens": 16384},
        "attention": {"use": "torch"},
        "scheduler": {"max_running_requests": RUNNING, "estimate_max_new_tokens": 4, "max_queued_requests": queue},
        "server": server,
    }
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}) as one:
        yield one
        assert "Traceback" not in one.log(), one.log()


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that only trouble it."""
    with served(model, tmp_path_factory.mktemp("shared")) as one:
        yield one


@pytest.fixture
def own(model: Path, tmp_path: Path) -> Iterator[Served]:
    """One for a test that ends it, or a part of it."""
    with served(model, tmp_path) as one:
        yield one


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


def scheduler_of(server: Served) -> psutil.Process:
    (child,) = schedulers_of(server)
    return child


def schedulers_of(server: Served) -> list[psutil.Process]:
    """There are other helpers too."""
    children = psutil.Process(server.process.pid).children()
    return [one for one in children if "pegboard.core.server.scheduler_process" in one.cmdline()]


def state(server: Served) -> dict[str, Any]:
    return dict(httpx.get(f"{server.address}/server_info", timeout=PATIENCE).json()["scheduler"])


def busy(server: Served, running: int, waiting: int) -> bool:
    now = state(server)
    return (now["running_requests"], now["waiting_requests"]) == (running, waiting)


def assert_nothing_is_left(server: Served) -> None:
    """The books balance, once whatever was aborted has ended."""
    wait_for(lambda: busy(server, 0, 0))
    now = state(server)
    assert now["free_tokens"] + now["cached_tokens_now"] == now["total_tokens"]
    assert (now["locked_tokens"], now["held_tokens"], now["book_errors"], now["failed_batches"]) == (0, 0, 0, 0)


def generate(server: Served, prompt: list[int], **sampling: Any) -> httpx.Response:
    body = {"input_ids": prompt, "sampling_params": {**SHORT, **sampling}}
    return httpx.post(f"{server.address}/generate", json=body, timeout=PATIENCE)


def works(server: Served) -> None:
    answer = generate(server, [5, 6, 7])
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["completion_tokens"] == SHORT["max_new_tokens"]


def test_the_queue_is_bounded_where_the_config_does_not_say(shared: Served) -> None:
    now = state(shared)
    assert (now["max_queued_requests"], now["max_queued_tokens"]) == (2048, 16 * 16384)


class Crowd:
    """Requests under way at once, each in a task that ends with (status, last event or body)."""

    def __init__(self, server: Served, sampling: dict[str, Any]) -> None:
        self.server = server
        self.sampling = sampling
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx.AsyncClient(base_url=server.address, timeout=PATIENCE, limits=limits)
        self.tasks: list[asyncio.Task[tuple[int, dict[str, Any]]]] = []

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.client.aclose()

    def send(self, count: int, *, stream: bool) -> None:
        self.tasks += [asyncio.create_task(self._one(len(self.tasks) + i, stream)) for i in range(count)]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait, while the requests go on."""
        await asyncio.to_thread(wait_for, condition)

    async def answers(self) -> list[tuple[int, dict[str, Any]]]:
        return await asyncio.gather(*self.tasks)

    async def _one(self, number: int, stream: bool) -> tuple[int, dict[str, Any]]:
        body = {"input_ids": [number % 300, number // 300, 9], "stream": stream, "sampling_params": self.sampling}
        async with self.client.stream("POST", "/generate", json=body) as answer:
            text = (await answer.aread()).decode()
        if not text.startswith("data: "):
            return answer.status_code, json.loads(text)
        *_, last, done = text.strip().split("\n\n")
        assert done == "data: [DONE]"
        return answer.status_code, json.loads(last.removeprefix("data: "))


def finish(answer: dict[str, Any]) -> str:
    return str(answer["meta_info"]["finish_reason"]["type"])


def test_a_killed_scheduler_fails_what_runs_and_is_replaced(own: Served) -> None:
    """Running and waiting requests, streamed and not, get an error that says why; later ones are served as before."""
    before = generate(own, [5, 6, 7]).json()["output_ids"]
    first = scheduler_of(own)

    async def scene() -> list[tuple[int, dict[str, Any]]]:
        async with Crowd(own, ENDLESS) as crowd:
            crowd.send(6, stream=True)
            crowd.send(6, stream=False)
            await crowd.until(lambda: busy(own, RUNNING, 12 - RUNNING))
            first.kill()
            return await crowd.answers()

    answers = asyncio.run(scene())
    assert [status for status, _ in answers] == [200] * 6 + [503] * 6
    for _, answer in answers:
        assert answer["error"]["code"] == "engine_failed"
        assert "was ended by signal 9" in answer["error"]["message"]
    # Again, while the next one still loads.
    wait_for(lambda: [one for one in schedulers_of(own) if one.pid != first.pid])
    assert generate(own, [5]).status_code == 503
    scheduler_of(own).kill()
    wait_for(lambda: httpx.get(f"{own.address}/health_generate", timeout=PATIENCE).status_code == 200)
    assert generate(own, [5, 6, 7]).json()["output_ids"] == before
    assert_nothing_is_left(own)


@pytest.mark.parametrize("whole_group", [False, True], ids=["SIGTERM", "Ctrl-C"])
def test_drains(own: Served, tmp_path: Path, whole_group: bool) -> None:
    """Running and waiting requests finish, new ones are refused, and nothing stays behind. A service manager tells the
    API process; a terminal interrupts every process of the group.
    """
    scheduler = scheduler_of(own)
    sockets = list(tmp_path.glob("pegboard-*"))
    assert len(sockets) == 1

    async def scene() -> list[tuple[int, dict[str, Any]]]:
        async with Crowd(own, {**SHORT, "max_new_tokens": 2000}) as crowd:
            crowd.send(RUNNING, stream=True)
            crowd.send(RUNNING, stream=False)
            await crowd.until(lambda: busy(own, RUNNING, RUNNING))
            if whole_group:
                scheduler.send_signal(signal.SIGINT)
            own.process.send_signal(signal.SIGINT if whole_group else signal.SIGTERM)
            await crowd.until(lambda: "Stopping" in own.log())
            refused = await asyncio.to_thread(generate, own, [5])
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            return await crowd.answers()

    answers = asyncio.run(scene())
    assert {(status, finish(answer)) for status, answer in answers} == {(200, "length")}
    assert {answer["meta_info"]["completion_tokens"] for _, answer in answers} == {2000}
    assert own.process.wait(PATIENCE) == 0
    assert not scheduler.is_running()
    assert not sockets[0].exists()


def test_a_second_signal_does_not_wait(own: Served, tmp_path: Path) -> None:
    async def scene() -> list[tuple[int, dict[str, Any]]]:
        async with Crowd(own, ENDLESS) as crowd:
            crowd.send(2, stream=True)
            crowd.send(2, stream=False)
            await crowd.until(lambda: busy(own, 4, 0))
            own.process.send_signal(signal.SIGTERM)
            await crowd.until(lambda: "Stopping" in own.log())
            own.process.send_signal(signal.SIGTERM)
            return await crowd.answers()

    answers = asyncio.run(scene())
    assert [finish(answer) for _, answer in answers] == ["abort"] * 4
    assert own.process.wait(PATIENCE) == 0
    assert not list(tmp_path.glob("pegboard-*"))


def connect(server: Served, receive_buffer: int | None = None) -> socket.socket:
    host, port = server.address.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE)
    connection.connect((host, int(port)))
    return connection


def ask(connection: socket.socket, body: dict[str, Any], *, held_back: int = 0) -> None:
    """Send a request, but for the last bytes of its body."""
    data = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data[: len(data) - held_back])


def read_all(connection: socket.socket) -> bytes:
    out = bytearray()
    while part := connection.recv(65536):
        out += part
    return bytes(out)


def test_clients_that_stall_before_the_end_of_their_request(shared: Served) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": SHORT}
    with contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(connect(shared)) for _ in range(50)]
        for connection in stalled:
            ask(connection, body, held_back=1)
        for _ in range(50):
            stack.enter_context(connect(shared)).sendall(b"POST /generate HTTP/1.1\r\nhost: localhost\r\n")
        works(shared)
        assert busy(shared, 0, 0)
        # One that goes on is answered; the others just leave.
        stalled[0].sendall(b"}")
        assert b'"completion_tokens":40' in read_all(stalled[0])
    works(shared)
    assert_nothing_is_left(shared)


@pytest.mark.full
def test_a_slow_reader_holds_nobody_up_and_loses_nothing(shared: Served) -> None:
    """A stream of more than sockets buffer, not read until others have been answered and its own has been computed."""
    sampling = {**ENDLESS, "max_new_tokens": 3000}
    whole = generate(shared, [8, 9, 10], **sampling).json()
    api = psutil.Process(shared.process.pid)
    resident = api.memory_info().rss
    with connect(shared, receive_buffer=4096) as slow:
        ask(slow, {"input_ids": [8, 9, 10], "stream": True, "sampling_params": sampling})
        wait_for(lambda: busy(shared, 1, 0))
        works(shared)
        assert_nothing_is_left(shared)
        works(shared)
        assert api.memory_info().rss - resident < 20 * 2**20, "the answer piles up"
        head, _, events = read_all(slow).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    # Chunked encoding: the events lie between lines with lengths, one or several of them.
    lines = [line for piece in events.split(b"\r\n") for line in piece.split(b"\n\n")]
    found = [json.loads(line.removeprefix(b"data: ")) for line in lines if line.startswith(b"data: {")]
    assert found[-1]["text"] == whole["text"]
    assert found[-1]["meta_info"]["completion_tokens"] == 3000
    assert len(found) < 3000, "it was never held up, so this shows nothing"


@pytest.mark.parametrize("how", [pytest.param("abort all", marks=pytest.mark.full), "leave"])
def test_a_thousand_requests_go_at_once(shared: Served, how: str) -> None:
    before = state(shared)

    async def scene() -> list[tuple[int, dict[str, Any]]]:
        async with Crowd(shared, ENDLESS) as crowd:
            crowd.send(500, stream=True)
            crowd.send(500, stream=False)
            await crowd.until(lambda: state(shared)["accepted"] == before["accepted"] + 1000)
            if how == "leave":
                return []
            reply = await asyncio.to_thread(
                httpx.post, f"{shared.address}/abort_request", json={"abort_all": True}, timeout=PATIENCE
            )
            assert reply.status_code == 200
            return await crowd.answers()

    answers = asyncio.run(scene())
    assert {status for status, _ in answers} <= {200}
    assert_nothing_is_left(shared)
    aborted = state(shared)["aborted"] - before["aborted"]
    assert aborted > 900, "too many had ended before"
    if answers:
        assert [finish(answer) for _, answer in answers].count("abort") == aborted
    works(shared)


def test_clients_that_neither_read_nor_write_do_not_keep_it_from_stopping(model: Path, tmp_path: Path) -> None:
    body = {"input_ids": [5, 6, 7], "stream": True, "sampling_params": {**ENDLESS, "max_new_tokens": 3000}}
    with (
        served(model, tmp_path, shutdown_timeout=1) as server,
        connect(server) as stalled,
        connect(server, 4096) as slow,
    ):
        ask(stalled, body, held_back=1)
        ask(slow, body)
        wait_for(lambda: busy(server, 1, 0))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        assert not list(tmp_path.glob("pegboard-*"))


def test_more_than_may_wait_get_503_before_any_header(model: Path, tmp_path: Path) -> None:
    """Streams, whole answers, and batches, which are taken whole or not at all; whoever was taken is not disturbed."""

    async def scene(server: Served) -> list[tuple[int, dict[str, Any]]]:
        async with Crowd(server, {**SHORT, "max_new_tokens": 3500}) as crowd:
            # In pairs, for all of a pair may have to wait until the next step takes them.
            for running, waiting in ((2, 0), (RUNNING, 0), (RUNNING, 2)):
                crowd.send(2, stream=waiting == 0)
                await crowd.until(lambda r=running, w=waiting: busy(server, r, w))  # type: ignore[misc]
            for path, body in (
                ("/generate", {"text": "hi"}),
                ("/generate", {"text": ["hi", "ho"]}),
                ("/v1/completions", {"prompt": "hi", "n": 2}),
            ):
                for stream in (False, True):
                    answer = await crowd.client.post(path, json={**body, "stream": stream})
                    assert answer.status_code == 503, answer.text
                    assert answer.json()["error"]["code"] == "queue_full"
            assert state(server)["rejected"] == 2 * (1 + 2 + 2)
            return await crowd.answers()

    with served(model, tmp_path, queue=2) as server:
        answers = asyncio.run(scene(server))
        assert {(status, finish(answer)) for status, answer in answers} == {(200, "length")}
        assert_nothing_is_left(server)
