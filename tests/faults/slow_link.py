"""A link on loopback that carries so many bytes a second and no more, in each direction."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

PIECE = 1 << 14


class SlowLink:
    """Listens on a port of loopback, and passes on what comes to a Unix socket. `rate` is in bytes per second, for all
    connections together; 0: as fast as it goes. It may be set while it runs.
    """

    def __init__(self, to: str) -> None:
        self.rate = 0.0
        self._to = to
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._turns = threading.Lock(), threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for one in self._ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._to)
                near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends += [near, far]
                for source, to, turn in ((near, far, self._turns[0]), (far, near, self._turns[1])):
                    threading.Thread(target=self._carry, args=(source, to, turn), daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket, turn: threading.Lock) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                with turn:
                    if self.rate:
                        time.sleep(len(data) / self.rate)
                to.sendall(data)
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_WR)
