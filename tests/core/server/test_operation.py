"""The server as operators know it: HTTPS, keys, the log of requests, and whether it is ready."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from pegboard.conformance.checkpoints import write_tiny_tokenizer
from tests.core.server.api_server import PATIENCE, Server, running, wait_for

TLS = Path(__file__).parents[2] / "data" / "tls"
USER, ADMIN = "a-key-for-users", "a-key-for-admins"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_tokenizer(directory)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").touch()
    return directory


@dataclass
class Guarded:
    """A server with keys that speaks HTTPS; `loading` is what it answered while it was loading."""

    server: Server
    loading: httpx.Response

    def get(self, path: str, key: str = "") -> httpx.Response:
        return self.server.client.get(path, headers={"authorization": f"Bearer {key}"} if key else {})

    def post(self, path: str, key: str = "", **headers: str) -> httpx.Response:
        body = {"text": "the prompt", "sampling_params": {"max_new_tokens": 2}}
        more = {"x-api-key": key} if key else {}
        return self.server.client.post(path, json=body, headers={**more, **headers})


def keys(directory: Path) -> dict[str, str]:
    found = {}
    for name, key in (("api_key_file", USER), ("admin_key_file", ADMIN)):
        file = directory / name
        file.write_text(key)
        file.chmod(0o600)
        found[name] = str(file)
    return found


@pytest.fixture(scope="module")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("guarded")
    trust = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
    tls = {"cert_file": str(TLS / "server.pem"), "key_file": str(TLS / "server.key")}
    options = {"tls": tls, **keys(directory), "access_log": True, "request_timeout": 3.0}
    with running(model, directory, builder="build_when_told", verify=trust, **options) as server:
        wait_for(lambda: "Loading" in server.log)
        port = psutil.Process(server.process.pid).net_connections("inet")[0].laddr.port
        loading = httpx.get(f"https://127.0.0.1:{port}/ready", verify=trust, timeout=PATIENCE)
        (directory / "go").touch()
        yield Guarded(server.started(), loading)


def test_https_from_the_first_moment(guarded: Guarded) -> None:
    assert guarded.server.url.startswith("https://127.0.0.1:")
    assert guarded.loading.status_code == 503
    assert guarded.loading.json()["error"]["code"] == "not_ready"
    assert int(guarded.loading.headers["retry-after"]) > 0
    plain = guarded.server.url.replace("https", "http")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{plain}/health", timeout=PATIENCE)
    with pytest.raises(httpx.ConnectError, match=r"self-signed|unable to get local issuer"):
        httpx.get(f"{guarded.server.url}/health", timeout=PATIENCE)


def test_keys_of_files(guarded: Guarded) -> None:
    for path, nobody, user, admin in (
        ("/health", 200, 200, 200),
        ("/ready", 200, 200, 200),
        ("/docs", 200, 200, 200),
        ("/v1/models", 401, 200, 200),
        ("/openapi.json", 401, 200, 200),
        ("/server_info", 401, 200, 200),
        ("/nowhere", 401, 404, 404),
    ):
        assert [guarded.get(path, key).status_code for key in ("", USER, ADMIN)] == [nobody, user, admin], path
        assert guarded.get(path, "wrong").status_code == nobody
    assert [guarded.post("/generate", key).status_code for key in ("", "wrong", USER, ADMIN)] == [401, 401, 200, 200]
    assert [guarded.post("/flush_cache", key).status_code for key in ("", USER, ADMIN)] == [401, 403, 200]


def test_30166_no_key_is_told(guarded: Guarded) -> None:
    info = guarded.get("/server_info", ADMIN)
    assert info.json()["config"]["server"]["api_key_file"]
    assert guarded.post("/generate", USER).status_code == 200
    family = [psutil.Process(guarded.server.process.pid), *psutil.Process(guarded.server.process.pid).children(True)]
    told = [info.text, guarded.get("/openapi.json", ADMIN).text, guarded.server.log, guarded.get("/x", USER).text]
    told += [" ".join(process.cmdline()) for process in family]
    told += [process.name() for process in family]
    assert not [text for text in told if USER in text or ADMIN in text]
    assert "authorization: Bearer KEY" in guarded.server.log, "it says where to put the key"


def test_a_line_per_request(guarded: Guarded) -> None:
    assert guarded.post("/generate?password=hidden", USER, **{"x-request-id": "find-me"}).status_code == 200
    wait_for(lambda: "find-me" in guarded.server.log)
    [line] = [line for line in guarded.server.log.splitlines() if "find-me" in line]
    assert re.search(r" api INFO POST /generate 200 in [\d.]+ ms \(request find-me from 127\.0\.0\.1:\d+\)$", line)
    assert "hidden" not in guarded.server.log
    assert "the prompt" not in guarded.server.log


def test_silent_connections_are_closed(guarded: Guarded) -> None:
    host, port = guarded.server.url.removeprefix("https://").split(":")
    trust = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
    with (
        socket.create_connection((host, int(port)), timeout=PATIENCE) as plain,
        trust.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(b"POST /generate HTTP/1.1\r\nhost: localhost\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tls": {"cert_file": "/nowhere.pem"}}, "server.tls.cert_file: /nowhere.pem cannot be read"),
        ({"api_key_file": "/nowhere"}, "server.api_key_file: /nowhere cannot be read"),
    ],
)
def test_wrong_files_stop_the_start(model: Path, tmp_path: Path, options: dict[str, object], words: str) -> None:
    with running(model, tmp_path, builder="build_and_die", **options) as server:
        assert server.process.wait(PATIENCE) == 1
        assert words in server.log
        assert "Loading" not in server.log


def test_ready_while_there_is_a_scheduler(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, watchdog=1.0) as server:
        server.started()
        assert server.client.get("/ready").status_code == 200
        os.kill(server.counters()["pid"], signal.SIGSTOP)
        # It is noticed, killed, and another one started; meanwhile whoever asks is told when to ask again.
        wait_for(lambda: server.client.get("/ready").status_code == 503)
        assert server.client.get("/health").status_code == 200
        wait_for(lambda: server.client.get("/ready").status_code == 200)

        body = {"text": "hi", "stream": True, "sampling_params": {"max_new_tokens": 1000}}
        with server.client.stream("POST", "/generate", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "Stopping" in server.log)
            for path in ("/ready", "/health_generate"):
                refused = httpx.get(f"{server.url}{path}", timeout=PATIENCE)
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) > 0
            refused = httpx.post(f"{server.url}/generate", json={"text": "hi"}, timeout=PATIENCE)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert int(refused.headers["retry-after"]) > 0
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["meta_info"]["completion_tokens"] == 1000
        assert server.process.wait(PATIENCE) == 0
