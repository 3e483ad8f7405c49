"""deploy/nginx.conf in a real nginx, where there is one: streams pass by the event, and no POST is sent twice."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

CONF = Path(__file__).parents[2] / "deploy" / "nginx.conf"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(NGINX is None or os.geteuid() != 0, reason="needs nginx, and root for the folders of Debian's"),
]


class Upstream:
    """A server that refuses, or streams two events: the second one when `go` is set."""

    def __init__(self) -> None:
        self.status, self.asked = 200, 0
        self.go = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer.asked += 1
                self.rfile.read(int(self.headers.get("content-length", 0)))
                if outer.status != 200:
                    self.send_response(outer.status)
                    self.send_header("content-length", "0")
                    self.end_headers()
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                self.event("one")
                assert outer.go.wait(60)
                self.event("two")
                self.wfile.write(b"0\r\n\r\n")

            def do_GET(self) -> None:
                self.do_POST()

            def event(self, text: str) -> None:
                data = f"data: {text}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()

            def log_message(self, *args: object) -> None:
                """Writes nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads, self.http.block_on_close = True, False

    @contextlib.contextmanager
    def running(self) -> Iterator[Upstream]:
        thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.05})
        with self.http:
            thread.start()
            try:
                yield self
            finally:
                self.go.set()
                self.http.shutdown()
                thread.join()


@pytest.fixture
def upstreams() -> Iterator[list[Upstream]]:
    with Upstream().running() as one, Upstream().running() as two:
        yield [one, two]


@pytest.fixture
def client(tmp_path: Path, upstreams: list[Upstream]) -> Iterator[httpx.Client]:
    """A client of an nginx that has the config but for its addresses."""
    text, door = CONF.read_text("utf-8"), tmp_path / "door"
    for number, upstream in enumerate(upstreams, 1):
        text, count = re.subn(rf"server-{number}:\d+", f"127.0.0.1:{upstream.http.server_address[1]}", text)
        assert count == 1
    text = text.replace("listen 8080;", f"listen unix:{door};")
    (tmp_path / "nginx.conf").write_text(text)
    assert NGINX is not None
    settings = f"pid {tmp_path}/pid; daemon off;"
    command = [NGINX, "-e", "stderr", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-g", settings]
    subprocess.run([*command, "-t"], check=True, capture_output=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(door)), base_url="http://servers", timeout=90) as found:
            yield found
    finally:
        process.terminate()
        process.wait(60)


def test_each_event_passes_when_it_comes(client: httpx.Client, upstreams: list[Upstream]) -> None:
    with client.stream("POST", "/v1/completions", json={"stream": True}) as answer:
        events = (line for line in answer.iter_lines() if line)
        assert next(events) == "data: one"
        for upstream in upstreams:
            upstream.go.set()  # a proxy that waits for more would not get here
        assert list(events) == ["data: two"]


def test_what_one_refuses_is_not_sent_to_the_other(client: httpx.Client, upstreams: list[Upstream]) -> None:
    """A 503 can be the end of a request that made a scheduler fail, and would fail the other's."""
    refusing, serving = upstreams
    refusing.status = 503
    serving.go.set()
    assert {client.post("/v1/completions", json={}).status_code for _ in range(6)} == {200, 503}
    assert refusing.asked + serving.asked == 6
    assert refusing.asked > 1  # it is asked again: a full queue is short
    assert {client.get("/v1/models").status_code for _ in range(6)} == {200}


def test_a_server_that_is_not_there_gets_nothing(client: httpx.Client, upstreams: list[Upstream]) -> None:
    gone, serving = upstreams
    gone.http.shutdown()
    gone.http.server_close()
    serving.go.set()
    assert {client.post("/v1/completions", json={}).status_code for _ in range(6)} == {200}
    assert serving.asked == 6


def test_refusals_of_all_are_passed_on(client: httpx.Client, upstreams: list[Upstream]) -> None:
    for upstream in upstreams:
        upstream.status = 503
    assert client.post("/v1/completions", json={}).status_code == 503


def test_other_errors_stand(client: httpx.Client, upstreams: list[Upstream]) -> None:
    for upstream in upstreams:
        upstream.status = 500
    assert client.post("/v1/completions", json={}).status_code == 500
    assert sum(upstream.asked for upstream in upstreams) == 1


def test_metrics_are_not_passed_on(client: httpx.Client) -> None:
    assert client.get("/metrics").status_code == 404
