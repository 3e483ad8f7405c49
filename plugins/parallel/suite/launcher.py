"""The conformance suite of RankLauncher. The ranks are processes that do what their line says, and have no model."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from pegboard.conformance.suite import ContractSuite, capability, lacks
from pegboard.plugins.parallel.api import LaunchContext, RankHandle, RankLauncher

MODULE = "pegboard.plugins.parallel.suite.launcher"
SECONDS = 60.0
SOON = 0.2
STRANGE = (b"x" * 1000, b'{"index": 1}\n', bytes(64))
"""What strangers say to a launcher that listens."""
CUT_OFF_SECONDS = 30.0
"""How long it may take to end their connections."""


class Act(msgspec.Struct):
    """What a rank does once it has said "here" over its socket `file`: send back what comes, until it is told to leave
    or its standard input ends. It leaves with `code`, or by signal `-code`.
    """

    file: int
    code: int = 0
    padding: str = ""


def main() -> None:
    """Be a rank of these tests."""
    act = msgspec.json.decode(sys.stdin.buffer.readline(), type=Act)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    threading.Thread(target=_end_with_input, daemon=True).start()
    with socket.socket(fileno=act.file) as link:
        link.sendall(f"here {os.getpid()} {threads} {len(act.padding)}\n".encode())
        while (data := link.recv(100)) != b"leave":
            link.sendall(data)
    if act.code < 0:
        os.kill(os.getpid(), -act.code)
    sys.exit(act.code)


def _end_with_input() -> None:
    while os.read(0, 100):
        pass
    os._exit(77)


class RankLauncherContract(ContractSuite):
    """Ranks get their line and their socket, say how they end, and end when they have to."""

    contract = "rank_launcher"

    @contextlib.contextmanager
    def launcher(self, size: int = 2) -> Iterator[RankLauncher]:
        """Yield a launcher of ranks that share as many cores."""
        made: RankLauncher = self.build(LaunchContext(size, size, MODULE, machines=True))
        try:
            yield made
        finally:
            made.close()

    @contextlib.contextmanager
    def rank(
        self, launcher: RankLauncher, code: int = 0, padding: int = 0
    ) -> Iterator[tuple[RankHandle, socket.socket]]:
        """Yield a rank that has begun, and our end of its socket."""
        handle = launcher.start(lambda file: msgspec.json.encode(Act(file, code, "x" * padding)) + b"\n")
        with handle.connection as ours:
            ours.settimeout(SECONDS)
            try:
                yield handle, ours
            finally:
                handle.kill()

    def test_a_rank_gets_its_line_and_its_socket(self) -> None:
        with self.launcher() as launcher, self.rank(launcher, padding=200_000) as (handle, ours):
            assert ours.recv(100) == f"here {handle.pid} 1 200000\n".encode(), (
                "its process, threads, and its whole line"
            )
            ours.sendall(b"and back")
            assert ours.recv(100) == b"and back"

    def test_it_runs_until_it_ends(self) -> None:
        with self.launcher() as launcher, self.rank(launcher) as (handle, ours):
            ours.recv(100)
            assert handle.died(SOON) is None, "its standard input stays open"
            ours.sendall(b"leave")
            assert handle.died(SECONDS) == "exited with code 0"

    @pytest.mark.parametrize(("code", "said"), [(3, "exited with code 3"), (-9, "was ended by signal 9")])
    def test_how_it_ends_is_told(self, code: int, said: str) -> None:
        with self.launcher() as launcher, self.rank(launcher, code) as (handle, ours):
            ours.recv(100)
            ours.sendall(b"leave")
            assert handle.died(SECONDS) == said
            assert handle.died(0.0) == said, "as often as it is asked"

    def test_kill_ends_it_and_may_be_called_again(self) -> None:
        with self.launcher() as launcher, self.rank(launcher) as (handle, ours):
            ours.recv(100)
            handle.kill()
            assert ours.recv(100) == b"", "its end of the socket is closed"
            handle.kill()
            assert handle.died(0.0) == "was ended by signal 9"

    def test_its_socket_is_nobody_elses(self) -> None:
        """Its end is seen at once: no other process keeps the socket open."""
        with self.launcher(3) as launcher, self.rank(launcher) as (first, ours), self.rank(launcher) as (second, other):
            ours.recv(100)
            other.recv(100)
            assert first.pid != second.pid
            ours.sendall(b"leave")
            assert ours.recv(100) == b""
            other.sendall(b"x")
            assert other.recv(100) == b"x"

    def test_one_follows_another(self) -> None:
        """As after a rank's death."""
        with self.launcher() as launcher:
            for _ in range(2):
                with self.rank(launcher) as (handle, ours):
                    assert ours.recv(100).startswith(f"here {handle.pid} ".encode())

    @capability("machines")
    def test_ranks_connect_by_tcp(self) -> None:
        with self.launcher() as launcher:
            assert launcher.address is not None
            with self.rank(launcher) as (_, ours):
                assert ours.family in (socket.AF_INET, socket.AF_INET6)
                assert ours.getsockname()[:2] == launcher.address
                assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "steps are short messages"

    @lacks("machines")
    def test_it_does_not_listen(self) -> None:
        with self.launcher() as launcher, self.rank(launcher) as (handle, ours):
            assert launcher.address is None
            assert ours.family not in (socket.AF_INET, socket.AF_INET6)
            assert not handle.host

    @capability("machines")
    def test_strangers_are_cut_off(self) -> None:
        """Connections to a launcher that are not from its ranks: those that speak before a rank comes, and those that
        say nothing at the latest when it closes. The rank is not disturbed.
        """
        with contextlib.ExitStack() as closing:
            with self.launcher() as launcher:
                assert launcher.address is not None
                silent, *strangers = [
                    closing.enter_context(socket.create_connection(launcher.address, SECONDS))
                    for _ in range(1 + len(STRANGE))
                ]
                for stranger, said in zip(strangers, STRANGE, strict=True):
                    stranger.sendall(said)
                for stranger in strangers[::2]:
                    assert _ends(stranger), "a stranger was not cut off"
                with self.rank(launcher) as (handle, ours):
                    assert ours.recv(100).startswith(f"here {handle.pid} ".encode())
                strangers[1].sendall(bytes(64))
                assert _ends(strangers[1]), "a stranger was not cut off"
            assert _ends(silent), "a stranger stays connected to a launcher that is closed"


def _ends(connection: socket.socket) -> bool:
    """Return whether the other end closes a connection."""
    connection.settimeout(CUT_OFF_SECONDS)
    try:
        while connection.recv(1000):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


if __name__ == "__main__":
    main()
