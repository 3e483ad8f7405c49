"""Programs that talk to the ports of prefill and decode servers as no server of ours would."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pegboard.plugins.disagg.frames import FrameReader
from pegboard.plugins.disagg.handshake import Answering, Connecting, Self
from pegboard.plugins.disagg.link import Link
from pegboard.plugins.disagg.messages import MAX_FRAME, AboutRooms, Facts, Message, decode

PATIENCE = 30.0
NO_FACTS = Facts(b"identity", {"model": "another one"}, "Engine", (2, 2), (4, 4))


def own(role: str, secret: bytes, facts: Facts = NO_FACTS) -> Self:
    return Self(role, b"a-stranger".ljust(16, b"."), facts, b"description", secret)


def closed(connection: socket.socket, most: int = 4096) -> bytes:
    """What a server says until it closes a connection, which must be soon, and little."""
    connection.settimeout(PATIENCE)
    said = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(65536):
            said += more
            assert len(said) <= most, "it says a lot to a stranger"
    return said


def sends(port: int, data: bytes) -> bytes:
    """What a server says to these bytes before it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as one:
        with contextlib.suppress(ConnectionError):
            one.sendall(data)
        return closed(one)


@dataclass
class Signed:
    """A connection whose handshake this program goes through, as a decode server with this secret and these facts."""

    port: int
    secret: bytes
    facts: Facts
    link: Link = field(init=False)
    connection: socket.socket = field(init=False)

    def __enter__(self) -> Signed:
        self.link = Link(Connecting(own("decode", self.secret, self.facts)), time.monotonic())
        self.connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        self.connection.sendall(self.link.output())
        while self.link.peer is None and not self.link.over:
            self.hear()
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def hear(self) -> list[AboutRooms]:
        """Take what comes next, and answer to pings."""
        data = self.connection.recv(65536)
        if not data:
            self.link.end("closed")
        said = self.link.receive(data, time.monotonic())
        self.connection.sendall(self.link.output())
        return said

    def listen(self) -> None:
        """Take all that comes, until the connection is closed."""
        with contextlib.suppress(OSError):
            while not self.link.over:
                self.hear()

    def say(self, messages: Sequence[AboutRooms]) -> None:
        for one in messages:
            self.link.send(one)
        self.connection.sendall(self.link.output())


class Recorder:
    """Listens, passes on to a port of loopback, and keeps what has come from the side that connects."""

    def __init__(self, port: int) -> None:
        self.sent = bytearray()
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        for one in (self._listening, *self._ends):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    @property
    def messages(self) -> list[Message]:
        reader = FrameReader(MAX_FRAME)
        reader.feed(bytes(self.sent))
        found = []
        while (body := reader.next()) is not None:
            found.append(decode(body))
        return found

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            near, _ = self._listening.accept()
            far = socket.create_connection(("127.0.0.1", self._port))
            self._ends = [near, far]
            threading.Thread(target=self._carry, args=(far, near), daemon=True).start()
            self._carry(near, far, self.sent)

    def _carry(self, source: socket.socket, to: socket.socket, kept: bytearray | None = None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if kept is not None:
                    kept += data
                to.sendall(data)
        for one in (source, to):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


# ---- false prefill servers -------------------------------------------------------------------------------------------

Manner = Callable[[socket.socket], None]


def silent(one: socket.socket) -> None:
    closed(one, most=2**20)


def hangs_up(one: socket.socket) -> None:
    one.close()


def talks_rubbish(one: socket.socket) -> None:
    one.sendall(b"\0\0\0\5rubbi")
    closed(one, most=2**20)


def claims_four_gigabytes(one: socket.socket) -> None:
    one.sendall(b"\xff\xff\xff\xff")
    for _ in range(4096):
        one.sendall(bytes(2**16))


def dribbles(one: socket.socket) -> None:
    one.sendall(b"\0\0\0\x40")
    for _ in range(100):
        one.sendall(b"x")
        time.sleep(0.2)


def signs_wrongly(one: socket.socket) -> None:
    link = Link(Answering(own("prefill", b"another secret, of as many bytes")), time.monotonic())
    while data := one.recv(65536):
        link.receive(data, time.monotonic())
        one.sendall(link.output())


def has_no_secret(one: socket.socket) -> None:
    link = Link(Answering(own("prefill", b"")), time.monotonic())
    while data := one.recv(65536):
        link.receive(data, time.monotonic())
        one.sendall(link.output())


MANNERS: tuple[Manner, ...] = (
    silent,
    hangs_up,
    talks_rubbish,
    claims_four_gigabytes,
    dribbles,
    signs_wrongly,
    has_no_secret,
)


@contextlib.contextmanager
def false_prefill(port: int, manner: Manner) -> Iterator[None]:
    """Listen at a port, and treat each connection in a manner."""

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = listening.accept()
                threading.Thread(target=treat, args=(one,), daemon=True).start()

    def treat(one: socket.socket) -> None:
        with contextlib.suppress(OSError), one:
            manner(one)

    with socket.create_server(("127.0.0.1", port)) as listening:
        threading.Thread(target=run, daemon=True).start()
        yield
        listening.shutdown(socket.SHUT_RDWR)
