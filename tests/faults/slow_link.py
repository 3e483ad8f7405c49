"""A link on loopback that carries so many bytes a second and no more, in each direction."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

PIECE = 1 << 14
LOOK = 0.05
"""Seconds after which it looks again at what it may carry."""


class SlowLink:
    """Listens on a port of loopback, and passes on what comes `to` a Unix socket, or a host and port.

    `rate` is in bytes per second, for all connections together; 0: as fast as it goes. While it is `deaf` it accepts
    and carries nothing. Both, and `to`, may be set while it runs.
    """

    def __init__(self, to: str | tuple[str, int], at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.rate = 0.0
        self.deaf = False
        self.to = to
        self._listening = socket.create_server(at)
        self._ends: list[socket.socket] = []
        self._turns = threading.Lock(), threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listening.getsockname()
        return host, port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.address[1]}"

    def cut(self) -> None:
        """End all connections; new ones are taken."""
        ends, self._ends = self._ends, []
        for one in ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        far = socket.socket(socket.AF_UNIX if isinstance(self.to, str) else socket.AF_INET)
        self._ends += [near, far]
        try:
            far.connect(self.to)
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            near.close()
            far.close()
            return
        for source, to, turn in ((near, far, self._turns[0]), (far, near, self._turns[1])):
            threading.Thread(target=self._carry, args=(source, to, turn), daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket, turn: threading.Lock) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                with turn:
                    self._take_time(len(data), to)
                to.sendall(data)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    def _take_time(self, nbytes: int, to: socket.socket) -> None:
        """Wait for as long as these bytes take, or until their connection has ended."""
        left = float(nbytes)
        while (self.deaf or (self.rate and left > 0)) and to.fileno() >= 0:
            pause = LOOK if self.deaf else min(LOOK, left / self.rate)
            time.sleep(pause)
            left -= 0.0 if self.deaf else pause * self.rate
