"""A real server in a process of its own, for end-to-end tests of plugins."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

START_S = 120.0
"""How long a server may take to answer, by default: a slow machine that loads a tiny model, with room to spare."""

STOP_S = 60.0
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Served:
    """A server that answers at `address` ("http://127.0.0.1:PORT")."""

    address: str
    process: subprocess.Popen[bytes]
    log_file: Path

    def log(self) -> str:
        """Return what it has written so far, both streams together."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def serving(
    config: Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    start_s: float = START_S,
    port: int = 0,
    program: Sequence[str] = ("-m", "pegboard"),
) -> Iterator[Served]:
    """``pegboard serve`` with this config on a port of 127.0.0.1, 0 for a free one, until the block ends.

    `env` replaces the environment, `program` what Python runs with the arguments ``serve PATH``. Its end is a SIGTERM,
    as an operator would send it. Raises RuntimeError with the log where it does not answer ``/health`` within `start_s`
    seconds, or does not end within a minute.
    """
    with tempfile.TemporaryDirectory(prefix="pegboard-serving-") as directory:
        path, log_file = Path(directory, "config.json"), Path(directory, "server.log")
        data = {**config, "server": {**config.get("server", {}), "host": "127.0.0.1", "port": port}}
        path.write_text(json.dumps(data), encoding="utf-8")
        command = [sys.executable, *program, "serve", str(path)]
        with log_file.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ if env is None else env))
        served = Served("", process, log_file)
        try:
            served = replace(served, address=_address_when_healthy(served, start_s))
            yield served
        finally:
            _stop(served)


def _address_when_healthy(served: Served, seconds: float) -> str:
    """Return where it says that it listens: a port chosen here could be another's by the time that it listens."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (code := served.process.poll()) is not None:
            raise RuntimeError(f"the server ended with exit code {code}:\n{served.log()}")
        if ready := re.search(r"^Ready on (\S+)\n", served.log(), re.MULTILINE):
            with (
                contextlib.suppress(urllib.error.URLError, OSError),
                urllib.request.urlopen(f"{ready[1]}/health", timeout=5),
            ):
                return ready[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not answer within {seconds:g} s:\n{served.log()}")


def _stop(served: Served) -> None:
    served.process.terminate()
    try:
        served.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        served.process.kill()
        served.process.wait()
        raise RuntimeError(f"the server did not end within {STOP_S:g} s of a SIGTERM:\n{served.log()}") from None


def free_ports(count: int) -> list[int]:
    """Return ports that nothing has. They lie below those that the kernel gives to connections, which come and go: such
    a port may be taken before a server listens at it, or while one starts again.
    """
    try:
        first = int(PORT_RANGE.read_text().split()[0])
    except OSError:
        first = 32768
    draw, found = random.SystemRandom(), set[int]()
    while len(found) < count:
        port = draw.randrange(10_000, max(first, 20_000))
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("", port))
            found.add(port)
    return list(found)
