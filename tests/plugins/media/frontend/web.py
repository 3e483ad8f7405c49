"""A web server for tests that does what its paths say, at two addresses of this machine: one that may be connected to,
and one that may not.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegboard.plugins.media.frontend.fetch import Fetcher, FetchLimits

OPEN, CLOSED = "127.0.0.1", "127.0.0.2"
"""The address that tests allow, and its neighbour inside."""
PATIENCE = 20.0

Answer = Callable[[socket.socket], None]


@dataclass
class Web:
    """`answers` by path; `seen` are the heads of requests, `touched` the addresses to which connections were made."""

    answers: dict[str, Answer] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    port: int = 0
    tls: ssl.SSLContext | None = None
    stopping: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str, host: str = "open.test", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def serve(self, address: str, listener: socket.socket) -> None:
        while not self.stopping.is_set():
            with contextlib.suppress(TimeoutError, OSError):
                line, _ = listener.accept()
                self.touched.append(address)
                threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        line.settimeout(PATIENCE)
        with contextlib.suppress(OSError):
            if self.tls is not None:
                line = self.tls.wrap_socket(line, server_side=True)
            with contextlib.closing(line):
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    piece = line.recv(1)
                    if not piece:
                        return
                    head += piece
                self.seen.append(head.decode())
                self.answers[head.split()[1].decode()](line)


@contextlib.contextmanager
def web(tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    """A server that runs."""
    site = Web(tls=tls)
    with contextlib.ExitStack() as stack:
        for address in (OPEN, CLOSED):
            listener = stack.enter_context(socket.create_server((address, site.port)))
            listener.settimeout(0.1)
            site.port = listener.getsockname()[1]
            threading.Thread(target=site.serve, args=(address, listener), daemon=True).start()
        yield site
        site.stopping.set()


def says(*parts: bytes, pause: float = 0.0) -> Answer:
    """Send these, with pauses, and close."""

    def answer(line: socket.socket) -> None:
        for part in parts:
            line.sendall(part)
            time.sleep(pause)

    return answer


def endless(head: bytes, part: bytes, pause: float = 0.0) -> Answer:
    """Send a head, and then this until the other side has gone."""

    def answer(line: socket.socket) -> None:
        line.sendall(head)
        while True:
            line.sendall(part)
            time.sleep(pause)

    return answer


def whole(body: bytes, *headers: str, status: str = "200 OK") -> Answer:
    """Answer with a body of known length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return says("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


def moved(where: str, status: str = "302 Found") -> Answer:
    return whole(b"", f"Location: {where}", status=status)


def fetcher(site: Web, names: Mapping[str, Sequence[str]] | None = None, **more: Any) -> Fetcher:
    """A fetcher that may connect to OPEN alone, and knows these names."""
    known = {"open.test": [OPEN], "closed.test": [CLOSED], "both.test": [OPEN, CLOSED], **(names or {})}

    def resolve(host: str, port: int) -> Sequence[str]:
        with contextlib.suppress(ValueError):
            return [str(ipaddress.ip_address(host))]
        if host not in known:
            raise OSError("no such name")
        return known[host]

    options: dict[str, Any] = {"resolve": resolve, "allowed": lambda address: str(address) == OPEN}
    keys: dict[str, Any] = {key: more.pop(key) for key in ("resolve", "allowed", "tls") if key in more}
    asked: dict[str, Any] = {"max_bytes": 10_000, "seconds": PATIENCE, "ports": (site.port,), **more}
    limits = FetchLimits(**asked)
    return Fetcher(limits, **{**options, **keys})
