"""The launcher `torchrun`: ranks run under processes that torchrun has started, on one machine.

    torchrun --nproc-per-node 2 -m pegboard.plugins.parallel.torchrun serve config.yaml

Rank 0 of torchrun's is the server, as if ``pegboard`` had been called with these arguments. Each of the others
(`attend`) runs one rank at a time as a child process, for as long as the server's process lives. So a rank that ends is
started anew with the scheduler, as with `processes`; torchrun steps in where one of its own processes ends.

They meet in a directory that only this user can use. The scheduler's process listens there; it sends a process that
comes the rank's orders and the open socket of its control connection, and learns how the rank has ended.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import msgspec

from pegboard.core.interfaces.errors import PegboardError, Temporary
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.parallel.api import LaunchContext, RankHandle, RankLauncher
from pegboard.plugins.parallel.messages import Link, LinkError
from pegboard.plugins.parallel.processes import set_threads

COME_SECONDS = 120.0
"""How long a process of torchrun's may take to ask for a rank, and rank 0 to be there."""
_KILL_SECONDS = 10.0
_RETRY_SECONDS = 0.1
_SERVER, _RANKS = "server", "ranks"
"""Sockets: that of the server's own process, which tells its end; and that of the scheduler's."""


class Job(msgspec.Struct, frozen=True):
    """A rank to be run: ``python -m module`` with `line` on its standard input, and the socket that comes along as its
    open file `file`.
    """

    module: str
    line: bytes
    file: int
    threads: int


class Began(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """How a rank has ended, for a sentence that begins with it."""

    how: str


_encode = msgspec.msgpack.Encoder().encode
_job = msgspec.msgpack.Decoder(Job)
_news: msgspec.msgpack.Decoder[Began | Ended] = msgspec.msgpack.Decoder(Began | Ended)


def meeting_place(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory of the processes that torchrun has started with this one; None: it has not."""
    names = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    if not all(name in environment for name in names):
        return None
    digest = sha256(repr([os.getuid(), *(environment[name] for name in names)]).encode()).hexdigest()
    return Path(tempfile.gettempdir(), f"pegboard-torchrun-{digest[:16]}")  # the path of a socket has to be short


class Torchrun(RankLauncher[NoOptions]):
    """Hands ranks to the processes of torchrun that wait for them."""

    def __init__(self, options: NoOptions, ctx: LaunchContext) -> None:
        super().__init__(options, ctx)
        place = meeting_place()
        assert place is not None, "supports has said so"
        check_private(place)
        self._before = set_threads(ctx.threads)
        self._listener = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError):  # of a scheduler that was killed
            (place / _RANKS).unlink()
        self._listener.bind(str(place / _RANKS))
        self._listener.listen(ctx.size)
        self._listener.settimeout(COME_SECONDS)

    @classmethod
    def supports(cls, options: NoOptions, ctx: LaunchContext) -> str | None:
        """Return None where torchrun has started as many processes as there are ranks, on this machine."""
        place, world = meeting_place(), os.environ.get("WORLD_SIZE", "")
        if place is None or not place.exists():
            return "this server was not started by torchrun -m pegboard.plugins.parallel.torchrun"
        if world != os.environ.get("LOCAL_WORLD_SIZE"):
            return "torchrun has started processes on several machines, and ranks are on one"
        if world != str(ctx.size):
            text = f"torchrun has started {world} processes, and parallel.tensor times parallel.pipeline is"
            return f"{text} {ctx.size}; make them equal"
        return ctx.too_few_cores()

    def start(self, line: Callable[[int], bytes]) -> RankHandle:
        try:
            attendant, _ = self._listener.accept()
        except TimeoutError:
            raise Temporary(f"no process of torchrun's has come within {COME_SECONDS:g} s") from None
        attendant.settimeout(COME_SECONDS)
        ours, theirs = socket.socketpair()
        with theirs:
            file = theirs.fileno()
            socket.send_fds(attendant, [b"\0"], [file])
        rank = Attended(Link(attendant), ours)
        rank.begin(Job(self.ctx.module, line(file), file, self.ctx.threads))
        return rank

    def close(self) -> None:
        self._listener.close()
        set_threads(self._before)


class Attended(RankHandle):
    """A rank that a process of torchrun's runs, at the other end of `link`. It ends with this connection."""

    def __init__(self, link: Link, connection: socket.socket) -> None:
        self.link = link
        self.connection = connection
        self._lock = threading.Lock()
        self._pid = 0
        self._how: str | None = None

    def begin(self, job: Job) -> None:
        self.link.send(_encode(job))
        while not self._pid and self._how is None:
            self._hear()

    @property
    def pid(self) -> int:
        return self._pid

    def died(self, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        with self._lock:
            while self._how is None and (left := deadline - time.monotonic()) > 0:
                if select.select([self.link.socket], [], [], left)[0]:
                    self._hear()
        return self._how

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.link.socket.shutdown(socket.SHUT_WR)
        how = self.died(_KILL_SECONDS)
        self.link.close()
        if how is None:
            raise PegboardError(f"process {self._pid} does not end")

    def _hear(self) -> None:
        try:
            frames = self.link.receive()
        except (OSError, LinkError):
            frames = None
        if frames is None:
            self._how = "ended with the process of torchrun's that ran it"
        for frame in frames or ():
            news = _news.decode(frame)
            if isinstance(news, Began):
                self._pid = news.pid
            else:
                self._how = news.how


def check_private(place: Path) -> None:
    """Raise PegboardError unless a directory is this user's, which other users cannot enter."""
    status = place.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise PegboardError(f"{place} is not a directory that only this user can use; remove it")


def attend(place: Path) -> None:
    """Run ranks, one after the other, for the server that meets others at `place`, until it ends. Raises PegboardError
    where it does not come.
    """
    deadline = time.monotonic() + COME_SECONDS
    while (server := _connected(place / _SERVER)) is None:
        if time.monotonic() > deadline:
            raise PegboardError(f"rank 0 of torchrun's has not come within {COME_SECONDS:g} s")
        time.sleep(_RETRY_SECONDS)
    check_private(place)
    with server:
        while not select.select([server], [], [], _RETRY_SECONDS)[0]:
            if (connection := _connected(place / _RANKS)) is not None:
                with connection, contextlib.suppress(OSError):  # the scheduler's process has ended
                    _run(connection, server)


def _connected(path: Path) -> socket.socket | None:
    made = socket.socket(socket.AF_UNIX)
    try:
        made.connect(str(path))
    except OSError:  # it is not there, or its listener is gone
        made.close()
        return None
    return made


def _run(connection: socket.socket, server: socket.socket) -> None:
    """Run the rank that comes over a connection, until it ends, or one of the two sockets does. Raises OSError where
    the other end of the connection is gone.
    """
    if connection not in select.select([connection, server], [], [])[0]:
        return
    data, files, *_ = socket.recv_fds(connection, 1, 1)
    if not data or not files:
        return
    link = Link(connection)
    frames: list[bytes] | None = []
    try:
        while frames == []:
            frames = link.receive()
        if frames is None:
            return
        job = _job.decode(frames[0])
        child, line_end = _spawn(job, files[0])
    finally:
        os.close(files[0])
    watch = os.pidfd_open(child)
    with os.fdopen(watch), os.fdopen(line_end, "wb", buffering=0) as line:
        try:
            link.send(_encode(Began(child)))
            line.write(job.line)
            select.select([watch, connection.fileno(), server.fileno()], [], [])
        finally:
            os.kill(child, signal.SIGKILL)  # nothing, where it has ended
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        link.send(_encode(Ended(f"was ended by signal {-code}" if code < 0 else f"exited with code {code}")))


def _spawn(job: Job, link: int) -> tuple[int, int]:
    """Start a rank; return its process, and the other end of its standard input."""
    line_end, other = os.pipe()
    moves = [(os.POSIX_SPAWN_DUP2, line_end, 0), (os.POSIX_SPAWN_DUP2, link, job.file)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads)}
    try:
        command = [sys.executable, "-m", job.module]
        return os.posix_spawn(sys.executable, command, environment, file_actions=moves), other
    finally:
        os.close(line_end)


def serve(place: Path) -> None:
    """Be the server, and tell the others at `place` when it has ended."""
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
    check_private(place)
    with socket.socket(socket.AF_UNIX) as alive:
        with contextlib.suppress(FileNotFoundError):
            (place / _SERVER).unlink()
        alive.bind(str(place / _SERVER))
        alive.listen(int(os.environ["WORLD_SIZE"]))  # none is accepted: each ends with this process
        try:
            runpy.run_module("pegboard", run_name="__main__", alter_sys=True)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    place = meeting_place()
    if place is None:
        sys.exit("error: start this by torchrun --nproc-per-node N -m pegboard.plugins.parallel.torchrun serve CONFIG")
    if int(os.environ["RANK"]) == 0:
        serve(place)
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # the server drains first, and this ends with it
        signal.signal(number, signal.SIG_IGN)
    attend(place)


if __name__ == "__main__":
    main()
