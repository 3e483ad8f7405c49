"""Processes that are measured: started, waited for, weighed, and ended with all their children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pegboard.conformance.servers import free_ports

POLL_S = 0.1
STOP_S = 20.0
"""So long a server may take to end by itself."""
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(Exception):
    """A server did not start, or ended; the message has the end of its log."""


class NotReady(ServerError):
    """A server takes no requests now."""


def checkout_python(path: Path) -> Path:
    """Return the Python of another checkout of Pegboard, given the checkout with its .venv, that Python, or the
    `pegboard` beside it. Raises ServerError.
    """
    if path.is_dir():
        path = path / ".venv" / "bin" / "python"
    elif path.name == "pegboard":
        path = path.with_name("python")
    if not path.exists():
        raise ServerError(f"there is no {path}: --against takes a checkout with a .venv, or its Python")
    # Not resolved: what a virtual environment has follows from the path by which its Python is called.
    return path.absolute()


@dataclass
class Running:
    """A server that runs at `url`."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    started: float

    def tree(self) -> list[psutil.Process]:
        """Return it and its children, as far as they are there."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def resident(self) -> int:
        """Return bytes of memory of it and its children; pages that they share are counted once."""
        found = 0
        for one in self.tree():
            with contextlib.suppress(psutil.Error):
                found += one.memory_full_info().pss
        return found

    def cpu_seconds(self) -> float:
        """Return what it and its children have used of the processor since they were started."""
        found = 0.0
        for one in self.tree():
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                found += times.user + times.system
        return found

    def end_of_log(self, lines: int = 25) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])
        return "(no log)"

    def check(self) -> None:
        """Raise ServerError where it has ended."""
        code = self.process.poll()
        if code is not None:
            raise ServerError(f"{self.name} ended with exit code {code}; the end of {self.log}:\n{self.end_of_log()}")


@contextlib.contextmanager
def running(
    name: str, command: Sequence[str], url: str, log: Path, *, env: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Start a server, and end it with all its children when the block ends, however that is."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        # A session of its own: Ctrl-C in the terminal reaches this program alone, which then ends the server.
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **(env or {})}, start_new_session=True
        )
    one = Running(name, process, url, log, time.perf_counter())
    try:
        yield one
    finally:
        stop(one)


def stop(one: Running, seconds: float = STOP_S) -> None:
    """Ask it to end; what is left of its tree after `seconds` is killed, each process by its id."""
    tree = one.tree()
    with contextlib.suppress(ProcessLookupError):
        one.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + seconds
    with contextlib.suppress(subprocess.TimeoutExpired):
        one.process.wait(seconds)
    known = {process.pid: process for process in (*tree, *one.tree())}
    _, left = psutil.wait_procs(
        [process for process in known.values() if process.pid != one.process.pid],
        timeout=max(0.0, deadline - time.monotonic()) if one.process.poll() is None else 2.0,
    )
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    if one.process.poll() is None:
        one.process.kill()
    one.process.wait()
    psutil.wait_procs(left, timeout=5)


def free_port() -> int:
    """Return a port that nothing has; see `free_ports`."""
    (port,) = free_ports(1)
    return port


def wait_healthy(one: Running, seconds: float, path: str = "/health") -> None:
    """Until this route answers with success. Raises ServerError."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        one.check()
        with contextlib.suppress(urllib.error.URLError, OSError), _direct.open(f"{one.url}{path}", timeout=5):
            return
        time.sleep(POLL_S)
    raise ServerError(f"{one.name} did not answer within {seconds:g} s; the end of {one.log}:\n{one.end_of_log()}")


def first_answer(one: Running, model: str, seconds: float) -> float:
    """Return seconds from the start of the process to the end of a first short answer."""
    wait_healthy(one, seconds)
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer = post(one, "/v1/completions", body)
            break
        except NotReady:  # a server may be healthy while it loads its model
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)
    took = time.perf_counter() - one.started
    if not answer["choices"][0]["text"].strip():
        raise ServerError(f"{one.name} answers with nothing: {answer}")
    return took


@contextlib.contextmanager
def reading(one: Running, path: str) -> Iterator[None]:
    """Read an endless stream of this route meanwhile, in a process of its own. Raises ServerError where it ended, or
    nothing came.
    """
    command = ["curl", "--silent", "--fail", "--no-buffer", "--noproxy", "*", f"{one.url}{path}"]
    with tempfile.TemporaryFile() as got:
        reader = subprocess.Popen(command, stdout=got)
        try:
            yield
            ended = reader.poll()
        finally:
            reader.kill()
            reader.wait()
        if ended is not None or not got.seek(0, os.SEEK_END):
            raise ServerError(f"{one.name}: {path}: the stream ended, or nothing came")


def post(one: Running, path: str, body: Mapping[str, Any]) -> Any:
    """Return a JSON route. Raises ServerError with what it says, NotReady for 503."""
    request = urllib.request.Request(
        f"{one.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with _direct.open(request, timeout=600) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        kind = NotReady if error.code == 503 else ServerError
        raise kind(f"{one.name}: {path}: {error.code}: {error.read()[:500]!r}") from None
    except OSError as error:
        raise ServerError(f"{one.name}: {path}: {error}; the end of {one.log}:\n{one.end_of_log()}") from None
