"""HelperChild: a helper process and the socket to it, for the thread that waits for it.

A helper is a module of its own, started as ``python -P -m MODULE``. Its standard input is a socket on which frames come
and go: a length of four bytes, and the data. It ends when the socket does. `serve` is its side of that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from pegboard.toolkit.system.environment import helper_environment
from pegboard.toolkit.system.helper_process import HelperLost, Watch, ended_itself

END_SECONDS = 5.0
"""How long the exit status of a process may take whose socket has ended."""
MOST_BYTES = 2**28
"""Most bytes of a frame."""
_PR_SET_PDEATHSIG = 1

Look = Callable[[float], None]
"""Called now and then while a helper works, with the seconds so far. May raise."""


class HelperEnded(Exception):
    """A helper ended through its own doing: it crashed, or came up against a limit. `code` as of `Popen.returncode`;
    None where it lives on without its socket, or talks nonsense.
    """

    def __init__(self, code: int | None) -> None:
        self.code = code
        super().__init__(f"it ended with {code}")


class HelperChild:
    """One process. Used by one thread at a time; `kill` may come from another.

    Raises OSError where it cannot be started. After any error of `ask` it is of no more use.
    """

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        self._killed = False
        self._lock = threading.Lock()
        with other:
            try:
                # A session of its own: a Ctrl-C in the terminal is not for it.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *arguments],
                    stdin=other.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=helper_environment(**environment),
                    start_new_session=True,
                )
            except BaseException:
                self._socket.close()
                raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def killed(self) -> bool:
        """Whether `kill` was called."""
        return self._killed

    def ask(self, data: bytes, seconds: float, look: Look | None = None, *, most: int = MOST_BYTES) -> bytes:
        """Send a frame, and return the one that answers it, of at most so many bytes.

        Raises HelperLost where something from outside killed or stopped the process, or where it gets so little
        computing time that `seconds` pass; HelperEnded where it ended by itself or says too much, and TimeoutError
        where it computed for all that time; and what `look` raises.
        """
        watch = Watch(self.pid, seconds, look)
        try:
            self._send(memoryview(frame(data)), watch)
            answer = read_frame(lambda size: self._receive(size, watch), most)
        except TimeoutError:
            raise
        except ValueError:
            # What runs there may have been taken over by what it reads.
            raise HelperEnded(None) from None
        except OSError:
            answer = None
        if answer is None:
            raise self._end()
        return answer

    def kill(self) -> None:
        """End the process as it stands; a thread that waits for it learns so."""
        with self._lock:
            self._killed = True
            if self._process.returncode is None:
                self._process.kill()

    def close(self) -> None:
        """End it and forget it. No thread may be using it."""
        self._socket.close()
        self.kill()
        self._process.wait()

    def _send(self, data: memoryview, watch: Watch) -> None:
        while data:
            watch.wait(self._socket.fileno(), select.POLLOUT)
            data = data[self._socket.send(data) :]

    def _receive(self, size: int, watch: Watch) -> bytes:
        watch.wait(self._socket.fileno(), select.POLLIN)
        return self._socket.recv(size)

    def _end(self) -> Exception:
        """Return what to raise: how it ended."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return HelperEnded(None)
        if self._killed:
            return HelperLost("it was ended")
        return HelperEnded(code) if ended_itself(code) else HelperLost(f"it was killed by signal {-code}")


def frame(data: bytes) -> bytes:
    """Return a frame's bytes."""
    return len(data).to_bytes(4, "little") + data


def read_frame(receive: Callable[[int], bytes], most: int = MOST_BYTES) -> bytes | None:
    """Return the next frame, or None where the other side has gone. `receive` is as of `socket.recv`. Raises
    ValueError for a frame of more than `most` bytes.
    """
    head = _read(receive, 4)
    if head is None:
        return None
    size = int.from_bytes(head, "little")
    if size > most:
        raise ValueError(f"a frame of {size} bytes, where {most} are the most")
    return _read(receive, size)


def _read(receive: Callable[[int], bytes], size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = receive(min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


# ---- in the helper ------------------------------------------------------------------------------------------------


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer frames on standard input until it ends."""
    with socket.socket(fileno=0) as connection:
        while (data := read_frame(connection.recv)) is not None:
            connection.sendall(frame(answer(data)))


def limit(limits: Sequence[tuple[int, int]]) -> None:
    """Set limits of this process, pairs of `resource.RLIMIT_*` and a number, as far as the system lets it."""
    for kind, most in limits:
        with contextlib.suppress(ValueError, OSError):
            _, hard = resource.getrlimit(kind)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))


@contextlib.contextmanager
def computing(seconds: float) -> Iterator[None]:
    """Have the kernel end this process where what is done in here computes for longer. Time on the clock does not
    count, so that nothing fails because the machine is busy.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it has gone, whatever it is doing then. `parent`
    is the process that should be there. On Linux; elsewhere a helper goes when it next looks at its socket.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
