"""Redis itself, where it is installed."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest


class RealRedis:
    """A process of redis-server on a Unix socket in a folder. Skips the test where it is not installed."""

    def __init__(self, folder: Path, *options: str) -> None:
        beside = str(Path(sys.executable).parent)
        program = shutil.which("redis-server", path=beside) or shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed")
        self.socket = folder / "socket"
        self._words = [program, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder)]
        self._words += options or ("--save", "")
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        """Run it, and wait until it answers: it listens before it has loaded what it kept."""
        self.process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while not self._answers():
            assert time.monotonic() < until, "redis-server does not start"
            time.sleep(0.02)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as one, contextlib.suppress(OSError):
            one.settimeout(5.0)
            one.connect(str(self.socket))
            one.sendall(b"PING\r\n")
            return one.recv(64).startswith(b"+PONG")
        return False

    def send(self, signal: int) -> None:
        self.process.send_signal(signal)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
