"""What reaches the server before any route: crowds of connections, web pages of elsewhere, names that clients choose.

Around a scheduler without a model, in processes of their own. What a clock decides stands in
tests/plugins/http_guard/test_connections.py.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.server.supervisor import Supervisor
from pegboard.plugins.http_guard.connections import IDLE_GRACE, SPARE_PLACES
from tests.core.server.api_server import PATIENCE, Server, running, wait_for
from tests.plugins.grammar.test_pool import Pools, script

TLS = Path(__file__).parents[1] / "data" / "tls"
PLACES = 3
ANNA, BEN, ADMIN = "the-key-of-anna", "the-key-of-ben", "the-key-of-admins"
SECRET = "a-secret-of-the-environment"
LONG = {"max_new_tokens": 50_000}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_tokenizer(directory)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").touch()
    return directory


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Few places and no keys."""
    with running(model, tmp_path_factory.mktemp("open"), max_connections=PLACES, allowed_hosts="named.test") as one:
        yield one.started()


@pytest.fixture(scope="module")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """HTTPS, keys, and a secret in the environment that it was started from."""
    options: dict[str, Any] = {
        "tls": {"cert_file": str(TLS / "server.pem"), "key_file": str(TLS / "server.key")},
        "verify": ssl.create_default_context(cafile=str(TLS / "ca.pem")),
        "api_key": [ANNA, BEN],
        "admin_key": ADMIN,
        "headers": {"x-api-key": ADMIN},
        "max_connections": PLACES + 2,
        "request_timeout": 2.0,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEGBOARD__SERVER__ADMIN_KEY", SECRET)
        patch.setenv("PEGBOARD_API_KEY", SECRET)
        one = running(model, tmp_path_factory.mktemp("guarded"), **options)
        with one as server:
            yield server.started()


def address(server: Server) -> tuple[str, int]:
    return "127.0.0.1", int(server.url.rpartition(":")[2])


def port_of(server: Server) -> int:
    (port,) = {one.laddr.port for one in sockets_of(server) if one.status == psutil.CONN_LISTEN}
    return int(port)


def sockets_of(server: Server) -> list[Any]:
    return psutil.Process(server.process.pid).net_connections("inet")


def connections_of(server: Server, port: int) -> int:
    """How many connections the server holds open."""
    return sum(one.laddr.port == port and one.status != psutil.CONN_LISTEN for one in sockets_of(server))


def be_alone(server: Server) -> None:
    """Wait until no earlier connection has a place."""
    server.client.close()
    server.client = httpx.Client(base_url=server.url, timeout=PATIENCE)
    wait_for(lambda: connections_of(server, port_of(server)) == 0)


def ask(server: Server, path: str = "/health", **headers: str) -> httpx.Response:
    """On a connection of its own."""
    return httpx.get(server.url + path, timeout=PATIENCE, headers=headers)


# ---- connections -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def crowd(where: tuple[str, int], size: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(where, timeout=PATIENCE)) for _ in range(size)]


def test_idle_connections_make_room(server: Server) -> None:
    be_alone(server)
    with crowd(address(server), PLACES) as taken:
        for connection in taken:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(1000)
        time.sleep(1.5 * IDLE_GRACE)
        assert server.generate(sampling_params={"max_new_tokens": 2}).status_code == 200
        assert taken[0].recv(1) == b"", "the one that was idle for the longest time"
        taken[-1].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"200 OK" in taken[-1].recv(1000)
    assert "server.max_connections" in server.log


def test_a_head_that_does_not_end_is_idle(server: Server) -> None:
    be_alone(server)
    with crowd(address(server), PLACES) as taken:
        for connection in taken:
            connection.sendall(b"POST /generate HTTP/1.1\r\nhost: loc")
        time.sleep(1.5 * IDLE_GRACE)
        assert ask(server, "/v1/models").status_code == 200


def test_probes_have_places_of_their_own(server: Server) -> None:
    """All places are at work, and a crowd that says nothing waits at the door."""
    body = json.dumps({"text": "hi", "stream": True, "sampling_params": LONG}).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    be_alone(server)
    with crowd(address(server), PLACES) as busy:
        for connection in busy:
            connection.sendall(head + body)
            assert b"200 OK" in connection.recv(1000)
        for path in ("/health", "/ping", "/ready"):
            assert ask(server, path).status_code == 200
        refused = ask(server, "/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "busy")
        assert refused.headers["connection"] == "close"
        with crowd(address(server), 3 * SPARE_PLACES):
            assert ask(server).status_code == 200
            wait_for(lambda: connections_of(server, port_of(server)) <= PLACES + SPARE_PLACES)
        assert all(connection.recv(100) for connection in busy), "they are served as before"


def test_unfinished_handshakes_count_and_end(guarded: Server) -> None:
    """They hold files and memory like any connection, and asyncio would give each a minute."""
    port = port_of(guarded)
    with crowd(address(guarded), 3 * SPARE_PLACES) as silent:
        began = time.monotonic()
        wait_for(lambda: guarded.client.get("/health").status_code == 200)
        wait_for(lambda: connections_of(guarded, port) <= PLACES + 2 + SPARE_PLACES)
        for connection in silent:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert time.monotonic() - began < 30, "a tenth of it is what a request may take here"
    assert guarded.client.get("/health").status_code == 200


def test_connections_are_bounded_while_the_model_loads(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, builder="build_when_told", max_connections=PLACES) as server:
        wait_for(lambda: "Loading" in server.log)
        port = port_of(server)
        with crowd(("127.0.0.1", port), 3 * SPARE_PLACES):
            assert httpx.get(f"http://127.0.0.1:{port}/ready", timeout=PATIENCE).status_code == 503
            began = time.monotonic()
            wait_for(lambda: connections_of(server, port) <= PLACES + SPARE_PLACES)
            assert time.monotonic() - began < 2.5, "they have only come to their own ends"


# ---- web pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:{port}", 200),
        ("127.0.0.1:{port}", 200),
        ("LOCALHOST.", 200),
        ("[::1]:80", 200),
        ("127.9.9.9", 200),
        ("named.test:8080", 200),
        ("evil.example", 403),
        ("evil.example:{port}", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("0.0.0.0:{port}", 403),
        ("10.0.0.1", 403),
        ("named.test.evil.example", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_dns_rebinding(server: Server, host: str, status: int) -> None:
    """A page may give its own name this server's address; what it then sends is of one origin for its browser."""
    headers = {"host": host.format(port=address(server)[1]), "sec-fetch-site": "same-origin"}
    for path, body in (("/health", None), ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 1}})):
        answer = server.client.request("POST" if body else "GET", path, json=body, headers=headers)
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["code"] == "unknown_host"
            assert "server.allowed_hosts" in answer.json()["error"]["message"]


def test_whatever_the_host_with_a_key(guarded: Server) -> None:
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 1}}
    headers = {"host": "public.example", "origin": "https://chat.example"}
    assert guarded.client.post("/generate", json=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("https://127.0.0.1:1", 403),
        ("http://localhost:{port}", 403),
        ("null", 403),
        ("http://127.0.0.1:{port}", 200),
        ("https://127.0.0.1:{port}", 200),
    ],
)
def test_foreign_origins_of_browsers_that_say_no_more(server: Server, origin: str, status: int) -> None:
    """Sec-Fetch-Site comes from new browsers only, and without TLS only to their own machine."""
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 1}}
    headers = {"origin": origin.format(port=address(server)[1]), "content-type": "text/plain"}
    answer = server.client.post("/generate", content=json.dumps(body), headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["code"] == "cross_site"


# ---- names that clients choose ---------------------------------------------------------------------------------------


def test_a_rid_is_one_clients_own(guarded: Server) -> None:
    """Two keys' clients have the same id at the same time; neither is refused, or gets what is the other's."""
    with contextlib.ExitStack() as stack:
        streams = []
        for key in (ANNA, BEN):
            body = {"text": "hi", "rid": "mine", "stream": True, "sampling_params": LONG}
            answer = stack.enter_context(
                guarded.client.stream("POST", "/generate", json=body, headers={"x-api-key": key})
            )
            assert answer.status_code == 200, answer.read()
            streams.append(answer.iter_lines())
        for lines in streams:
            assert json.loads(next(lines).removeprefix("data: "))["meta_info"]["id"] == "mine"
        again = guarded.client.post("/generate", json={"text": "hi", "rid": "mine"}, headers={"x-api-key": ANNA})
        assert (again.status_code, again.json()["error"]["code"]) == (400, "duplicate_rid")
        assert "'mine'" in again.json()["error"]["message"]
        refused = guarded.client.post("/abort_request", json={"rid": "mine"}, headers={"x-api-key": BEN})
        assert refused.status_code == 403, "ids are known to others than their owners"
        assert guarded.client.post("/abort_request", json={"rid": "mine"}).status_code == 200
        for lines in streams:
            rest = [line for line in lines if line]
            assert json.loads(rest[-2].removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"


def test_helpers_inherit_no_keys(guarded: Server) -> None:
    """The scheduler, and what renders templates."""
    conversation = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    guarded.client.post("/v1/chat/completions", json=conversation)
    children = psutil.Process(guarded.process.pid).children(recursive=True)
    assert children
    for child in children:
        assert SECRET not in str(child.environ()), child.cmdline()
        assert not [key for key in (ANNA, BEN, ADMIN) if key in str(child.environ())]


def test_the_schedulers_config_has_no_keys() -> None:
    data = {"model": {"path": "x/y"}, "server": {"api_key": [ANNA, BEN], "admin_key": ADMIN, "port": 5}}
    resolved = compose(data=data, env={})
    sent = Supervisor(resolved)._config
    assert not [key for key in (ANNA, BEN, ADMIN) if key in sent]
    assert ResolvedConfig.from_json(sent).engine.server.port == 5


def test_grammar_workers_inherit_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PEGBOARD__SERVER__API_KEY", "HF_TOKEN", "SOMEBODYS_PASSWORD"):
        monkeypatch.setenv(name, SECRET)
    pools = Pools(tmp_path)
    try:
        pool = pools()
        pool.submit(script("tokens 5 6")).result(PATIENCE)
        (pid,) = pool.pids()
        assert SECRET not in str(psutil.Process(pid).environ())
    finally:
        for one in pools.made:
            one.close()


# ---- what is not HTTP ------------------------------------------------------------------------------------------------


def test_nonsense_is_logged_with_a_limit(server: Server) -> None:
    before = len(server.log.splitlines())
    for number in range(40):
        with crowd(address(server), 1) as (connection,):
            connection.sendall(f"NONSENSE {number}\r\n\r\n".encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
    for _ in range(40):
        with crowd(address(server), 1) as (connection,):
            upgrade = b"connection: upgrade\r\nupgrade: websocket\r\n"
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + upgrade + b"\r\n")
            assert b"200 OK" in connection.recv(1000)
    lines = server.log.splitlines()[before:]
    assert 1 <= len(lines) <= 12, lines
    assert "was refused unread" in lines[0]
