"""A server on loopback that speaks as much of Redis' protocol as the storage uses, and nothing else."""

from __future__ import annotations

import fnmatch
import io
import socket
import socketserver
import threading
import time
import zlib
from collections import Counter

PASSWORD = "let me in"


class FakeRedis(socketserver.ThreadingTCPServer):
    """Holds values in memory. `strange` lists what it did not understand, which a test wants empty; `asked` counts
    commands, `connections` who came.

    What goes wrong is set while it runs: `silent` (answers nothing any more), `full` (takes no more values), `rubbish`
    (answers each command with these bytes), `rate` (bytes per second of its answers), `wants_password`.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Talk)
        self.values: dict[bytes, bytes] = {}
        self.expiry: dict[bytes, float] = {}
        self.lock = threading.RLock()
        self.asked: Counter[str] = Counter()
        self.strange: list[object] = []
        self.connections: list[socket.socket] = []
        self.full = self.wants_password = False
        self.rubbish = b""
        self.rate = 0.0
        self.pages = 1
        self.going = threading.Event()
        self.going.set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server_address[1]}"

    def stop_answering(self) -> None:
        """Be as one that was stopped by SIGSTOP: connections stay, and nothing comes."""
        self.going.clear()

    def hang_up(self) -> None:
        """Close all connections, as a server does that starts again."""
        for one in self.connections:
            one.close()
        self.connections.clear()

    def end(self) -> None:
        self.going.set()
        self.shutdown()
        self.server_close()
        for one in self.connections:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients may go away."""

    def answer(self, words: list[bytes]) -> bytes:
        """Return the answer to a command."""
        name = words[0].upper().decode("ascii", "replace")
        with self.lock:
            self.asked[name] += 1
            for key in [key for key, at in self.expiry.items() if at <= time.monotonic()]:
                self.values.pop(key, None)
                del self.expiry[key]
            match name, words[1:]:
                case "PING", []:
                    return b"+PONG\r\n"
                case "CLIENT", [b"SETINFO", _, _]:
                    return b"+OK\r\n"
                case "SELECT", [number] if number.isdigit():
                    return b"+OK\r\n"
                case "EXISTS", [key]:
                    return b":%d\r\n" % (key in self.values)
                case "EXPIRE", [key, seconds] if int(seconds) > 0:
                    if key in self.values:
                        self.expiry[key] = time.monotonic() + int(seconds)
                    return b":%d\r\n" % (key in self.values)
                case "MGET", [_, *_]:
                    return b"*%d\r\n" % (len(words) - 1) + b"".join(bulk(self.values.get(key)) for key in words[1:])
                case "SET", [key, value, *end] if not end or (end[0] == b"EX" and len(end) == 2 and int(end[1]) > 0):
                    if self.full:
                        return b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
                    self.values[key] = value
                    self.expiry.pop(key, None)
                    if end:
                        self.expiry[key] = time.monotonic() + int(end[1])
                    return b"+OK\r\n"
                case "UNLINK", [_, *_]:
                    return b":%d\r\n" % sum(self.values.pop(key, None) is not None for key in words[1:])
                case "SCAN", [cursor, b"MATCH", pattern, b"COUNT", count]:
                    return self.scan(int(cursor), pattern, int(count))
            self.strange.append(words)
            return b"-ERR unknown command\r\n"

    def scan(self, cursor: int, pattern: bytes, count: int) -> bytes:
        """Return a page of keys and the next cursor. Pages are by the keys' hash, so removing some does not shift them,
        and a page may be empty, as with Redis.
        """
        pages = max(1, len(self.values) // count) if cursor == 0 else self.pages
        self.pages = pages
        page = [key for key in self.values if zlib.crc32(key) % pages == cursor]
        found = [key for key in page if fnmatch.fnmatchcase(key.decode("latin-1"), pattern.decode("latin-1"))]
        following = (cursor + 1) % pages
        return b"*2\r\n" + bulk(b"%d" % following) + b"*%d\r\n" % len(found) + b"".join(map(bulk, found))


class _Talk(socketserver.StreamRequestHandler):
    """One connection."""

    server: FakeRedis

    def handle(self) -> None:
        self.server.connections.append(self.connection)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        known = not self.server.wants_password
        while (words := self.read()) is not None:
            self.server.going.wait()
            if words[0].upper() == b"AUTH":
                known = words[1:] in ([PASSWORD.encode()], [b"me", PASSWORD.encode()])
                answer = b"+OK\r\n" if known else b"-WRONGPASS invalid username-password pair\r\n"
            else:
                answer = self.server.answer(words) if known else b"-NOAUTH Authentication required.\r\n"
            self.send(self.server.rubbish or answer)

    def read(self) -> list[bytes] | None:
        """Read a command. What is not one, to the letter, ends the connection."""
        try:
            return read_command(self.rfile)
        except (OSError, EOFError):
            return None
        except ValueError as error:
            self.server.strange.append(error)
            return None

    def send(self, answer: bytes) -> None:
        rate = self.server.rate
        step = max(1, int(rate / 50)) if rate else len(answer)
        stream = io.BytesIO(answer)
        while part := stream.read(step):
            self.wfile.write(part)
            if rate:
                time.sleep(len(part) / rate)


def read_command(file: io.BufferedIOBase) -> list[bytes]:
    """Read an array of bulk strings. Raises EOFError at the end, and ValueError for anything else."""
    return [_bulk(file) for _ in range(_number(file, b"*"))]


def _bulk(file: io.BufferedIOBase) -> bytes:
    size = _number(file, b"$")
    data = file.read(size + 2)
    if len(data) < size + 2:
        raise EOFError
    if data[-2:] != b"\r\n":
        raise ValueError(f"a string of {size} bytes ends with {data[-2:]!r}")
    return data[:-2]


def _number(file: io.BufferedIOBase, kind: bytes) -> int:
    line = file.readline(64)
    if not line.endswith(b"\n"):
        raise EOFError
    if line[:1] != kind or not line.endswith(b"\r\n") or not line[1:-2].isdigit():
        raise ValueError(f"{line!r} where {kind!r} and a number should be")
    return int(line[1:-2])


def bulk(data: bytes | None) -> bytes:
    return b"$-1\r\n" if data is None else b"$%d\r\n%b\r\n" % (len(data), data)
