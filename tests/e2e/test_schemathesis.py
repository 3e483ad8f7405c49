"""schemathesis over the whole OpenAPI document: whatever the document allows, and much that it does not, is answered
with a documented status and a body that conforms, and never with a 5xx; and no key opens what is not its own.

In `make test` all built-in APIs around an engine that is none, over real HTTP; in `make test-full` a whole server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Response

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.conformance.servers import serving
from pegboard.core.config.sections import ServerSection
from pegboard.core.interfaces.http_front import HttpFront
from pegboard.toolkit.http.listening import listen
from pegboard.toolkit.http.openapi import json_answer
from pegboard.toolkit.http.server import HttpServer
from tests.e2e.explore import PATIENCE, explore
from tests.faults.whole_api import ADMIN_KEY, API_KEY, EVERY_API, whole_app


def every_api() -> FastAPI:
    """All of them behind keys, around an engine that is none."""
    client = FakeEngineClient()
    client.control_answers = {"start_profile": {}, "stop_profile": {"trace": "x"}}
    return whole_app(client, api_key=API_KEY, admin_key=ADMIN_KEY, max_body_bytes=100_000)


@contextlib.contextmanager
def listening(make: Callable[[], FastAPI]) -> Iterator[str]:
    """The address of an HTTP server in a thread."""
    listener = listen(ServerSection(port=0))
    running: list[tuple[asyncio.AbstractEventLoop, HttpServer]] = []
    started = threading.Event()

    async def serve() -> None:
        server = HttpServer(make(), HttpFront(listener, keyed=True))
        running.append((asyncio.get_running_loop(), server))
        started.set()
        await server.serve()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(PATIENCE)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop, server = running[0]
        loop.call_soon_threadsafe(server.leave)
        thread.join(PATIENCE)
        listener.close()


@pytest.mark.timeout(300)
def test_every_route_keeps_to_its_document() -> None:
    """Every boundary of every field, and what is beyond it; then some random ones."""
    with listening(every_api) as address:
        requests, found = explore(address, ADMIN_KEY, examples=2)
    assert not found, "\n\n".join(found[:10])
    assert requests > 2000, "it has hardly tried anything"


def test_it_would_notice() -> None:
    """The same exploration of an application that breaks its word in each way."""
    app = FastAPI()
    documented = json_answer({"type": "object", "required": ["a"]})

    @app.get("/status", responses=documented)
    async def status(x: int = 0) -> Response:
        return Response("{}", status_code=418, media_type="application/json")

    @app.get("/body", responses=documented)
    async def body() -> Response:
        return Response('{"b": 1}', media_type="application/json")

    @app.get("/bug", responses={**documented, 500: {}})
    async def bug() -> Response:
        return Response("{}", status_code=500, media_type="application/json")

    with listening(lambda: app) as address:
        _, found = explore(address, "no key", examples=1)
    assert {one.split(":")[0] for one in found} == {"GET /status", "GET /body", "GET /bug"}
    assert {one.split(": ")[1] for one in found} == {
        "Undocumented status code",
        "Response violates schema",
        "Server error",
    }


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_whole_server_keeps_to_its_document(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    config = {
        "model": {"path": str(model), "dtype": "float32", "context_length": 256},
        "memory": {"max_total_tokens": 4096},
        "attention": {"use": "torch"},
        "apis": list(EVERY_API),
        "server": {"api_key": API_KEY, "admin_key": ADMIN_KEY, "profile_dir": str(tmp_path / "traces")},
    }
    with serving(config, env={**os.environ, "OMP_NUM_THREADS": "1"}) as server:
        # Whoever pauses generation waits for it for ever.
        requests, found = explore(server.address, ADMIN_KEY, examples=15, seed=2, skip=["/pause_generation"])
        assert not found, "\n\n".join(found[:10])
        assert requests > 2000
        headers = {"x-api-key": ADMIN_KEY}
        state = httpx.get(f"{server.address}/server_info", headers=headers, timeout=PATIENCE).json()["scheduler"]
        assert (state["running_requests"], state["waiting_requests"], state["book_errors"]) == (0, 0, 0)
        assert "Traceback" not in server.log(), server.log()
