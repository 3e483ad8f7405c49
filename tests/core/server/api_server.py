"""Servers of their own process, around a scheduler without a model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

FAKES = Path(__file__).parent
LAUNCH = """
import json, sys
from pegboard.core.config.compose import compose
from pegboard.core.interfaces.errors import PegboardError
from pegboard.core.server.serve import serve
try:
    serve(compose(data=json.loads(sys.argv[1]), env={}), builder=sys.argv[2])
except PegboardError as error:
    sys.exit(f"error: {error}")
"""
PATIENCE = 60.0


class Server:
    """A server process of its own."""

    def __init__(
        self,
        model: Path,
        log: Path,
        builder: str = "build",
        apis: Any = ("openai", "native"),
        verify: ssl.SSLContext | bool = True,
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
        watchdog: float = 20.0,
        **server: Any,
    ) -> None:
        config = {
            "model": {"path": str(model)},
            "apis": apis,
            "server": {"port": 0, "max_body_bytes": 100_000, "shutdown_timeout": 30, **server},
            "scheduler": {"watchdog_timeout": watchdog},
            **(more or {}),
        }
        self.verify, self.headers = verify, dict(headers or {})
        path = os.pathsep.join((str(FAKES), os.environ["PYTHONPATH"]))
        env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(log.parent)}
        self.log_file = log
        self.client: httpx.Client = None  # type: ignore[assignment]  # once it has started
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, json.dumps(config), f"fake_scheduler:{builder}"],
                stdout=out,
                stderr=out,
                env=env,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def started(self) -> Server:
        wait_for(lambda: "Ready on" in self.log or self.process.poll() is not None)
        assert self.process.poll() is None, self.log
        self.url = self.log.partition("Ready on ")[2].split()[0]
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE, verify=self.verify, headers=self.headers)
        return self

    def generate(self, **body: Any) -> httpx.Response:
        return self.client.post("/generate", json={"text": "hi", **body})

    def counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = self.client.get("/server_info").json()["scheduler"]
        return counters

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


@contextlib.contextmanager
def running(model: Path, directory: Path, **options: Any) -> Iterator[Server]:
    server = Server(model, directory / "log", **options)
    try:
        yield server
    finally:
        if server.client is not None:
            server.client.close()
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
