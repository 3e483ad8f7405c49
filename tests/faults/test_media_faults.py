"""Kills at every stage of a request with media: no file and no process is left, and nobody else is harmed.

Real processes: an API process, its helper for media, and a scheduler without a model.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pegboard.toolkit.system.scratch import PREFIX
from tests.core.server.api_server import PATIENCE, Server, running, wait_for
from tests.fakes.toy_media import ppm
from tests.plugins.media.frontend.scene import picture, toy_model

HELPER = "pegboard.plugins.media.frontend.worker"
SCHEDULER = "pegboard.core.server.scheduler_process"
LONG = 100_000
"""Tokens of a request that does not end by itself."""


def url(data: bytes) -> str:
    return "data:image/x-portable-pixmap;base64," + base64.b64encode(data).decode()


PICTURE = url(ppm(picture(64, 64)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_model(tmp_path_factory.mktemp("model") / "model")


def serving(model: Path, path: Path, **media: Any) -> contextlib.AbstractContextManager[Server]:
    section = {"processor": {"use": "media_drill"}, **media}
    return running(model, path, builder="build_media", apis=["media_drill", "native"], more={"media": section})


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    with serving(model, tmp_path) as one:
        yield one.started()
    # Most tests leave it running, and it is killed.
    wait_for(lambda: not list(tmp_path.glob("pegboard-*")))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as one:
        yield one


def ask(server: Server, *urls: str, **body: Any) -> httpx.Response:
    return server.client.post("/media", json={"urls": urls, **body})


def files(server: Server) -> list[str]:
    """The files of media that are there, and at most one folder for them."""
    found = list(server.log_file.parent.glob(f"{PREFIX}*"))
    assert len(found) <= 1
    return [path.name for folder in found for path in folder.iterdir()]


def process(server: Server, module: str) -> psutil.Process | None:
    for one in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if module in one.cmdline():
                return one
    return None


class Slow:
    """A picture whose preparing takes as long as it likes."""

    def __init__(self, path: Path) -> None:
        self._begun = path / "begun"
        self._begun.touch()
        self.url = url(f"DRILL slow 1000 {self._begun}".encode())

    def at_work(self) -> bool:
        return bool(self._begun.read_text())


def gone(*processes: psutil.Process | None) -> bool:
    return not any(one is not None and one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def test_pictures_are_answered_and_leave_nothing(server: Server) -> None:
    """Of good requests and of bad ones."""
    assert ask(server, PICTURE, PICTURE, tokens=3, n=2).json()["ends"] == [{"type": "length"}] * 2
    bad = ask(server, PICTURE, url(b"nothing"))
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "urls.1"
    for drill in ("die", "eat", "raise"):
        assert ask(server, url(f"DRILL {drill}".encode())).status_code == 400
    assert files(server) == []
    assert ask(server, PICTURE).status_code == 200
    figures = server.client.get("/server_info").json()["media"]
    assert figures["items"]["image"] in (2, 3), "the good one beside a bad one may not have been needed any more"
    assert figures["failures"] == {"invalid_media": 2, "media_too_complex": 2}
    assert (figures["open"], figures["files"], figures["bytes_in_flight"]) == (0, 0, 0)
    assert server.stop() == 0


def test_a_body_may_be_as_large_as_media_are(server: Server) -> None:
    """The server takes 100,000 bytes of text; a picture may have more."""
    large = ask(server, url(ppm(picture(300, 300))))
    assert large.status_code == 200, large.text
    assert ask(server, url(bytes(60 * 2**20))).status_code == 413


def test_full_queues_answer_503(model: Path, tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    slow = Slow(tmp_path)
    with serving(model, tmp_path, max_queued=1, max_bytes_in_flight=2**20) as server:
        server.started()
        large = ask(server, url(bytes(2**20 + 1)))
        assert (large.status_code, large.json()["error"]["code"]) == (400, "media_too_large")
        held = threads.submit(ask, server, slow.url)
        wait_for(slow.at_work)
        busy = ask(server, PICTURE, url(ppm(picture())))
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "media_queue_full")
        assert busy.headers["retry-after"]
        helper = process(server, HELPER)
        server.process.kill()
        with pytest.raises(httpx.HTTPError):
            held.result(PATIENCE)
        wait_for(lambda: gone(helper))


def test_a_client_that_leaves(server: Server, tmp_path: Path) -> None:
    """While its picture is prepared, and while it is answered."""
    slow = Slow(tmp_path)
    port = int(server.url.rpartition(":")[2])
    for urls, seen in (([PICTURE, slow.url], slow.at_work), ([PICTURE], lambda: server.counters()["running_requests"])):
        body = json.dumps({"urls": urls, "tokens": LONG}).encode()
        with socket.create_connection(("127.0.0.1", port)) as line:
            head = f"POST /media HTTP/1.1\r\nHost: {line.getpeername()[0]}\r\nContent-Length: {len(body)}\r\n\r\n"
            line.sendall(head.encode() + body)
            wait_for(seen)
            assert files(server)
        wait_for(lambda: not files(server))
    wait_for(lambda: server.counters()["running_requests"] == 0)
    assert ask(server, PICTURE).status_code == 200


def test_the_scheduler_is_killed(server: Server, tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """Running requests fail; one that was being prepared is refused, or goes on to the next scheduler."""
    slow = Slow(tmp_path)
    running = [threads.submit(ask, server, PICTURE, tokens=LONG, n=2) for _ in range(2)]
    wait_for(lambda: server.counters()["running_requests"] == 4)
    preparing = threads.submit(ask, server, PICTURE, slow.url)
    wait_for(slow.at_work)
    scheduler, helper = process(server, SCHEDULER), process(server, HELPER)
    assert scheduler is not None
    assert helper is not None
    scheduler.kill()
    assert [one.result(PATIENCE).status_code for one in running] == [503, 503]
    # The picture may be ready already, or wait for its turn.
    wait_for(lambda: len(files(server)) in (3, 4))
    os.kill(helper.pid, signal.SIGKILL)
    wait_for(lambda: (fresh := process(server, HELPER)) is not None and fresh.pid != helper.pid)
    wait_for(lambda: _again(server).status_code == 200)
    later = process(server, HELPER)
    assert later is not None
    later.kill()
    assert preparing.result(PATIENCE).status_code == 503
    wait_for(lambda: not files(server))


@pytest.mark.parametrize("number", [2000])
def test_memory_is_flat(model: Path, tmp_path: Path, threads: ThreadPoolExecutor, number: int) -> None:
    """Over good requests and bad ones, of the API process and of its helper."""
    several = [url(ppm(picture(200, 300, seed))) for seed in range(5)]
    bad = [url(b"nothing"), "data:;base64,!", "http://127.0.0.1/", url(ppm(picture(200, 300))[:-1])]

    def some(server: Server, count: int) -> None:
        asked = [several[i % 5 : i % 5 + 2] if i % 4 else [bad[i // 4 % 4]] for i in range(count)]
        for _ in threads.map(lambda urls: ask(server, *urls), asked):
            pass

    def memory(server: Server) -> list[int]:
        helper = process(server, HELPER)
        assert helper is not None
        return [one.memory_info().rss >> 20 for one in (psutil.Process(server.process.pid), helper)]

    with serving(model, tmp_path, helper_bytes=2**29) as server:
        server.started()
        some(server, number // 2)
        before = memory(server)
        some(server, number)
        after = memory(server)
        figures = server.client.get("/server_info").json()["media"]
        assert figures["items"]["image"] >= number
        assert (figures["files"], figures["bytes_in_flight"], figures["helpers_lost"]) == (0, 0, 0)
        assert files(server) == []
    assert after[0] < 200
    assert after[1] < 512
    assert max(now - then for now, then in zip(after, before, strict=True)) < 24, (before, after)


def _again(server: Server) -> httpx.Response:
    return server.generate(sampling_params={"max_new_tokens": 1})


def held(server: Server, slow: Slow, threads: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """Requests that run and one that is being prepared."""
    found = [threads.submit(ask, server, PICTURE, tokens=LONG)]
    wait_for(lambda: server.counters()["running_requests"] == 1)
    found.append(threads.submit(ask, server, PICTURE, slow.url))
    wait_for(slow.at_work)
    return found


def test_the_api_process_is_killed(model: Path, tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """Its helper and its scheduler go with it, and what lay in its folder."""
    with serving(model, tmp_path) as server:
        server.started()
        waiting = held(server, Slow(tmp_path), threads)
        scheduler, helper = process(server, SCHEDULER), process(server, HELPER)
        assert files(server)
        server.process.kill()
        wait_for(lambda: gone(scheduler, helper))
        wait_for(lambda: not list(tmp_path.glob("pegboard-*")))
        for one in waiting:
            assert isinstance(one.exception(PATIENCE), httpx.HTTPError)


def test_all_are_killed_at_once(model: Path, tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """What they leave is removed by the next server that has the same folder for such things."""
    with serving(model, tmp_path) as server:
        server.started()
        waiting = held(server, Slow(tmp_path), threads)
        victims = [process(server, SCHEDULER), process(server, HELPER), psutil.Process(server.process.pid)]
        for one in victims:
            assert one is not None
            one.suspend()
        for one in victims:
            assert one is not None
            one.kill()
        wait_for(lambda: gone(*victims))
        for failed in waiting:  # before their client is closed, whose sockets' numbers others get
            assert isinstance(failed.exception(PATIENCE), httpx.HTTPError)
        assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 1
    with serving(model, tmp_path) as server:
        server.started()
        assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 1
        assert files(server) == []
        assert ask(server, PICTURE).status_code == 200
        server.stop()
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_a_server_that_is_told_to_stop(server: Server, tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    """While a picture is prepared and another answered: twice told, it waits for neither."""
    waiting = held(server, Slow(tmp_path), threads)
    scheduler, helper = process(server, SCHEDULER), process(server, HELPER)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "Stopping" in server.log)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0
    assert gone(scheduler, helper)
    assert not list(tmp_path.glob("pegboard-*"))
    assert [one.result(PATIENCE).status_code for one in waiting] == [200, 503]
