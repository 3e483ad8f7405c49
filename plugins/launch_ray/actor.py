"""What runs in an actor of Ray's: it starts one rank as a child process, and watches it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

from pegboard.toolkit.system.bound_command import bound_command
from pegboard.toolkit.system.keyed_sockets import connect

if TYPE_CHECKING:
    import socket

_KILL_SECONDS = 10.0


class RankActor:
    """Starts a rank, and knows how it ends. Several of its methods may run at once."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self, address: tuple[str, int], key: bytes) -> tuple[int, str]:
        """Connect to the leader; return the number of the open socket, and the address of this machine. Raises
        PegboardError.
        """
        self._connection = connect(address, key)
        return self._connection.fileno(), self._connection.getsockname()[0]

    def run(self, module: str, line: bytes, threads: int) -> int:
        """Start ``python -m module`` with this line, and the socket under the same number; return its process. Raises
        OSError.
        """
        assert self._connection is not None, "it was connected"
        with self._connection as connection:
            process = self._process = subprocess.Popen(
                bound_command(module),
                stdin=subprocess.PIPE,
                pass_fds=[connection.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: its socket says so
            process.stdin.write(line)
            process.stdin.flush()
        return process.pid

    def died(self, seconds: float) -> str | None:
        """Wait so long for the rank's end. Return how it ended; None: it runs, or was not started."""
        if self._process is None:
            return None
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        if self._process.stdin is not None:
            self._process.stdin.close()
        return f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"

    def kill(self) -> str | None:
        """End the rank; return how it ended, None: it does not end."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        return self.died(_KILL_SECONDS)
