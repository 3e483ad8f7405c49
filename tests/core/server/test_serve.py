"""The server as a whole, around a scheduler without a model: what it listens on, who is aborted, who is restarted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.core.config.sections import ServerSection
from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.http.listening import listen
from tests.core.server.api_server import PATIENCE, Server, running, wait_for

LONG = {"max_new_tokens": 50_000}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_tokenizer(directory)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").touch()
    return directory


@pytest.fixture(scope="module")
def full(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One whose scheduler takes nothing more."""
    with running(model, tmp_path_factory.mktemp("full"), builder="build_full") as one:
        yield one.started()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as they found it."""
    with running(model, tmp_path_factory.mktemp("shared")) as one:
        yield one.started()


@pytest.fixture
def own_server(model: Path, tmp_path: Path) -> Iterator[Server]:
    with running(model, tmp_path, watchdog=1.0) as one:
        yield one.started()


def test_says_how_to_try_it(server: Server) -> None:
    wait_for(lambda: "Try it:\n  curl" in server.log)
    command = server.log.partition("Try it:\n")[2].splitlines()[0].strip()
    done = subprocess.run(f"{command} -sS -m 60", shell=True, capture_output=True, check=True)
    assert json.loads(done.stdout)["choices"]
    wait_for(lambda: f"Or open {server.url}/ in a browser" in server.log)
    assert httpx.get(f"{server.url}/").headers["content-type"].startswith("text/html")


def test_listens_on_loopback_only(server: Server) -> None:
    processes = [psutil.Process(server.process.pid)]
    processes += processes[0].children(recursive=True)
    assert len(processes) >= 2
    listening = [c.laddr for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [(addr.ip, addr.port) for addr in listening] == [("127.0.0.1", int(server.url.rpartition(":")[2]))]


def test_wire_is_private(server: Server) -> None:
    [directory] = server.log_file.parent.glob("pegboard-*")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [one.is_socket() for one in directory.iterdir()] == [True]


def test_api_process_is_small_and_has_no_torch(server: Server) -> None:
    server.generate(sampling_params={"max_new_tokens": 5})
    memory = psutil.Process(server.process.pid)
    assert memory.memory_info().rss < 200 * 2**20
    assert not [one.path for one in memory.memory_maps() if "torch" in one.path or "transformers" in one.path]


def test_answers(server: Server) -> None:
    done = server.generate(sampling_params={"max_new_tokens": 5}).json()
    assert (done["text"], done["meta_info"]["completion_tokens"]) == ("aaaaa", 5)
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 4, "stream": True}
    ) as answer:
        assert list(answer.iter_lines())[-2] == "data: [DONE]"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", b"{", 400),
        ("/generate", b'{"text": ""}', 400),
        ("/generate", b'{"text": "a", "sampling_params": {"max_new_tokens": -1}}', 400),
        ("/generate", b'{"input_ids": [320]}', 400),
        ("/generate", b'{"text": "' + b"a" * 200_000 + b'"}', 413),
        ("/v1/completions", b'{"prompt": "a", "model": "x"}', 404),
        ("/nowhere", b"{}", 404),
    ],
)
def test_bad_input(server: Server, path: str, body: bytes, status: int) -> None:
    answer = server.client.post(path, content=body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_endless_headers_are_cut_off(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        answer = b"HTTP/1.1 431"
        with contextlib.suppress(ConnectionError):
            for number in range(2000):
                connection.sendall(f"x-{number}: {'y' * 1000}\r\n".encode())
            # They never end, so a server that took them would not answer.
            answer = connection.recv(1000)
        assert answer.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_aborts(server: Server, stream: bool) -> None:
    before = server.counters()["aborted"]
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"text": "hi", "stream": stream, "sampling_params": LONG}).encode()
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        if stream:
            assert b"200 OK" in connection.recv(1000)
        else:
            wait_for(lambda: bool(server.counters()["running_requests"]))
    wait_for(lambda: server.counters()["aborted"] == before + 1)
    assert server.counters()["running_requests"] == 0


def test_abort_by_id(server: Server) -> None:
    with server.client.stream(
        "POST", "/generate", json={"text": "hi", "rid": "victim", "stream": True, "sampling_params": LONG}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        httpx.post(f"{server.url}/abort_request", json={"rid": "victim"}, timeout=PATIENCE)
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(("token", "words"), [(7, "exited with code 5"), (9, "exited with code 1"), (8, "exited with")])
def test_a_scheduler_that_ends_is_restarted(own_server: Server, token: int, words: str) -> None:
    first = own_server.counters()["pid"]
    stream = {"text": "hi", "stream": True, "sampling_params": LONG}
    with own_server.client.stream("POST", "/generate", json=stream) as bystander:
        lines = bystander.iter_lines()
        next(lines)
        answer = httpx.post(f"{own_server.url}/generate", json={"input_ids": [token]}, timeout=PATIENCE)
        rest = [line for line in lines if line]
    assert answer.status_code == 503
    assert words in answer.json()["error"]["message"]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert rest[-1] == "data: [DONE]"
    wait_for(lambda: own_server.client.get("/health_generate").status_code == 200)
    assert own_server.client.get("/health").status_code == 200
    assert own_server.counters()["pid"] != first
    assert own_server.generate(sampling_params={"max_new_tokens": 2}).json()["text"] == "aa"


def test_a_scheduler_that_is_stopped_is_noticed(own_server: Server) -> None:
    """Its watchdog cannot see that: it is stopped as well."""
    first = own_server.counters()["pid"]
    os.kill(first, signal.SIGSTOP)
    answer = own_server.generate()
    assert answer.status_code == 503
    assert "did not answer for 3.25 s (stopped or hung), and was killed" in answer.json()["error"]["message"]
    assert not psutil.pid_exists(first)
    wait_for(lambda: own_server.client.get("/health_generate").status_code == 200)
    assert own_server.counters()["pid"] != first


def test_a_scheduler_that_raves_is_replaced(own_server: Server) -> None:
    first = own_server.counters()["pid"]
    answer = own_server.client.post("/generate", json={"input_ids": [10]})
    assert answer.status_code == 503
    assert "sent what this process cannot use (ValidationError" in answer.json()["error"]["message"]
    wait_for(lambda: own_server.client.get("/health_generate").status_code == 200)
    assert own_server.counters()["pid"] != first
    assert not psutil.pid_exists(first)


def test_sigterm_drains(own_server: Server) -> None:
    child = own_server.counters()["pid"]
    body = {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 1000}}
    with own_server.client.stream("POST", "/generate", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        own_server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "Stopping" in own_server.log)
        refused = httpx.post(f"{own_server.url}/generate", json={"text": "hi"}, timeout=PATIENCE)
        assert refused.status_code == 503
        assert httpx.get(f"{own_server.url}/health_generate", timeout=PATIENCE).status_code == 503
        assert httpx.get(f"{own_server.url}/health", timeout=PATIENCE).status_code == 200
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["meta_info"]["completion_tokens"] == 1000
    assert own_server.process.wait(PATIENCE) == 0
    assert not psutil.pid_exists(child)
    assert list(own_server.log_file.parent.glob("pegboard-*")) == []
    assert "Traceback" not in own_server.log
    assert re.search(r"\n\d{4}-\d\d-\d\d \d\d:\d\d:\d\d api INFO stopping: signal SIGTERM\n", own_server.log)


def test_drain_is_bounded(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, shutdown_timeout=0.2, more={"log_format": "json"}) as server:
        server.started()
        body = {"text": "hi", "stream": True, "sampling_params": LONG}
        with server.client.stream("POST", "/generate", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(PATIENCE) == 0
        logged = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
        told = [(one["event"], one["reason"], one.get("signal")) for one in logged if "event" in one]
        assert told == [("stopping", "signal", "SIGTERM"), ("stopped", "signal", None)]


@pytest.mark.full
def test_a_server_that_gives_up_says_so_in_its_log(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, more={"log_format": "json"}) as server:
        server.started()
        while server.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError, KeyError, ProcessLookupError):
                os.kill(server.counters()["pid"], signal.SIGKILL)
            time.sleep(0.05)
        told = [json.loads(line) for line in server.log.splitlines() if '"event":"stopping"' in line]
        assert [(one["reason"], one["level"]) for one in told] == [("error", "error")]
        assert "restarts have not helped" in told[0]["message"]


def test_scheduler_does_not_outlive_the_api_process(own_server: Server) -> None:
    child = psutil.Process(own_server.counters()["pid"])
    own_server.process.kill()
    own_server.process.wait()
    child.wait(PATIENCE)
    assert list(own_server.log_file.parent.glob("pegboard-*")) == []


@pytest.mark.parametrize(
    ("builder", "words"),
    [
        ("build_nothing", "error: this model is from another planet; choose one from here"),
        ("build_badly", "error: the scheduler could not start: ZeroDivisionError: nobody expected this"),
        ("build_and_die", "error: the scheduler process exited with code 3 while it was starting"),
    ],
)
def test_failing_starts_say_why(model: Path, tmp_path: Path, builder: str, words: str) -> None:
    with running(model, tmp_path, builder=builder) as server:
        assert server.process.wait(PATIENCE) == 1
        assert server.log.strip().splitlines()[-1] == words
        assert list(tmp_path.glob("pegboard-*")) == []


def test_taken_port(server: Server, model: Path, tmp_path: Path) -> None:
    port = int(server.url.rpartition(":")[2])
    with running(model, tmp_path, port=port) as second:
        assert second.process.wait(PATIENCE) == 1
        assert f"cannot listen on 127.0.0.1:{port}" in second.log
        assert f"--set server.port={port + 1}" in second.log


def test_a_port_is_taken_before_anything_is_loaded(model: Path, tmp_path: Path) -> None:
    """Two that are bound share a port; so they listen at once, and who connects meanwhile is told."""
    with running(model, tmp_path, builder="build_when_told", port=0) as server:
        wait_for(lambda: "Loading" in server.log)
        listening = [c.laddr for c in psutil.Process(server.process.pid).net_connections("inet")]
        port = listening[0].port
        with pytest.raises(PegboardError, match="stop what uses it"):
            listen(ServerSection(port=port))
        answer = httpx.post(f"http://127.0.0.1:{port}/generate", json={"text": "x" * 50_000}, timeout=PATIENCE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        for path, status in (
            ("/health", 200),
            ("/ping", 200),
            ("/health?x=1", 200),
            ("/ready", 503),
            ("/healthy", 503),
        ):
            for method in ("GET", "HEAD"):
                told = httpx.request(method, f"http://127.0.0.1:{port}{path}", timeout=PATIENCE)
                assert told.status_code == status, (method, path)
        (tmp_path / "go").touch()
        server.started()
        assert server.url.endswith(f":{port}")
        assert server.generate(sampling_params={"max_new_tokens": 2}).status_code == 200
        assert server.stop() == 0


def test_a_server_without_apis_says_so(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, apis=[]) as server:
        server.started()
        assert "apis is empty" in server.log
        assert server.client.get("/health").status_code == 404


def test_a_server_without_its_guard_serves(model: Path, tmp_path: Path) -> None:
    """It has keys and `server.max_body_bytes`; what the guard brings is refused by name."""
    off = {"plugins": {"http_guard": False}}
    with running(model, tmp_path, more=off) as server:
        server.started()
        assert server.generate(sampling_params={"max_new_tokens": 2}).status_code == 200
        assert server.client.post("/generate", content=b"x" * 100_001).status_code == 413
        assert server.stop() == 0
    with running(model, tmp_path, more=off, max_connections=5) as server:
        server.process.wait(PATIENCE)
        assert "server.max_connections: it needs the plugin 'http_guard'" in server.log


def test_connections_are_bounded(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, max_connections=2) as server, contextlib.ExitStack() as stack:
        server.started()
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        taken = [stack.enter_context(socket.create_connection(address, timeout=PATIENCE)) for _ in range(2)]
        body = json.dumps({"text": "hi", "stream": True, "sampling_params": LONG}).encode()
        head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        for connection in taken:
            # Idle ones would make room.
            connection.sendall(head.encode() + body)
            assert b"200 OK" in connection.recv(1000)
        refused = server.generate()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
        assert refused.headers["connection"] == "close"
        silent = stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
        assert silent.recv(1) == b"", "it takes a connection for ever"
        assert "server.max_connections" in server.log
        taken[0].close()
        wait_for(lambda: server.generate(sampling_params={"max_new_tokens": 2}).status_code == 200)


QUESTIONS = [
    ("/generate", {"text": "hi"}),
    ("/generate", {"text": ["hi", "ho"]}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": ["hi", "ho"]}),
    ("/v1/completions", {"prompt": "hi", "n": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), QUESTIONS)
def test_a_full_queue_is_a_503(full: Server, path: str, body: dict[str, Any], stream: bool) -> None:
    """Of a stream too: its headers go only when the scheduler has accepted it."""
    answer = full.client.post(path, json={**body, "stream": stream})
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": ["hi"] * 20, "sampling_params": {"max_new_tokens": 2}}),
        ("/generate", {"text": ["hi " * 500] * 20, "sampling_params": {"max_new_tokens": 2}}),
        ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2, "n": 20}}),
        ("/v1/completions", {"prompt": ["hi " * 1400 * i for i in range(1, 7)], "max_tokens": 2}),
        ("/v1/completions", {"prompt": "hi", "n": 20, "max_tokens": 2}),
    ],
)
def test_a_batch_is_one_message(server: Server, path: str, body: dict[str, Any]) -> None:
    before = server.counters()["messages"]
    assert server.client.post(path, json=body).status_code == 200
    assert server.counters()["messages"] == before + 1


def test_stopped_while_loading(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path) as server:
        wait_for(lambda: "Loading" in server.log)
        assert server.stop() == 0
        assert list(tmp_path.glob("pegboard-*")) == []
