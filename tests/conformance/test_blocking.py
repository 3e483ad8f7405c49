"""What counts as waiting, and what does not."""

from __future__ import annotations

import multiprocessing.connection
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

from pegboard.conformance.rig.blocking import no_waiting


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def blocked(call: Callable[[], object]) -> str:
    """What the call is told to have waited in; "" where it has not."""
    try:
        with no_waiting("this"):
            call()
    except AssertionError as error:
        return str(error).partition("blocks in ")[2].partition(",")[0]
    return ""


def test_a_connection_that_is_only_begun_does_not_wait(listener: socket.socket) -> None:
    with socket.socket() as sock:
        sock.setblocking(False)
        assert blocked(lambda: sock.connect_ex(listener.getsockname())) == ""
    with socket.socket() as sock:
        assert blocked(lambda: sock.connect(listener.getsockname())) == "socket.connect"
    with socket.socket() as sock:
        sock.settimeout(5)
        assert blocked(lambda: sock.connect_ex(listener.getsockname())) == "socket.connect"


def test_datagrams_and_local_sockets_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        assert blocked(lambda: sock.connect(("127.0.0.1", 9))) == ""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as sock:
        server.bind("here")
        server.listen()
        assert blocked(lambda: sock.connect("here")) == ""


def test_pipes_wait_only_where_nothing_has_arrived() -> None:
    ours, theirs = multiprocessing.connection.Pipe()
    assert blocked(lambda: ours.recv()) == "Connection.recv"
    assert blocked(lambda: ours.recv_bytes()) == "Connection.recv_bytes"
    assert blocked(lambda: multiprocessing.connection.wait([ours])) == "PollSelector.select"
    assert blocked(lambda: ours.poll(1.0)) == "PollSelector.select"
    theirs.send("news")
    assert blocked(lambda: ours.poll(0) and ours.recv()) == ""
    theirs.send("more")
    assert blocked(lambda: ours.recv()) == ""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_is_started_but_not_waited_for() -> None:
    process = get_context("fork").Process(target=time.sleep, args=(0.2,))
    assert blocked(lambda: process.start()) == ""
    assert blocked(lambda: process.join()) == "BaseProcess.join"
    assert blocked(lambda: process.join(0)) == ""
    process.join()
    assert process.exitcode == 0, "the process itself may wait"
    with subprocess.Popen([sys.executable, "-c", ""]) as popen:
        assert blocked(lambda: popen.wait()) == "Popen.wait"


def test_threads_are_started_but_not_waited_for() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    assert blocked(lambda: thread.start()) == ""
    assert blocked(lambda: thread.join()) == "Thread.join"
    assert blocked(lambda: done.wait(1.0)) == "Condition.wait"
    assert blocked(lambda: queue.Queue[int]().get(timeout=1.0)) == "Condition.wait"
    assert blocked(lambda: done.wait(0)) == ""
    assert blocked(lambda: time.sleep(0.01)) == "time.sleep"
    done.set()
    thread.join()
