"""Catches calls that wait where none may: sleeping, waiting for threads and processes, asking the network.

What it cannot see, since nothing tells whether such a call may wait: locks (`Lock.acquire`, `with lock`), which good
code takes too, `queue.SimpleQueue.get`, `os.read`, and libraries that wait in C.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import multiprocessing.process
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any
from unittest import mock

_EVENTS = frozenset({"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"})
"""Audit events of the interpreter."""

_WORK_ELSEWHERE = "let a thread or a process of your own do the work, and `poll` look how far it is"

_state = threading.local()


class _Waited(BaseException):
    """Ends the call that would wait; no `except Exception` of a plugin's stops it."""


@contextlib.contextmanager
def no_waiting(what: str, instead: str = _WORK_ELSEWHERE, *, files: bool = True) -> Iterator[None]:
    """Fail where this thread waits meanwhile, and say what to do `instead`. Starting a thread or a process is not
    waiting; other threads may. Without `files`, a file that is opened to write to counts, too.
    """
    _listen()
    _state.found, _state.files = [], files
    profile = sys.getprofile()
    try:
        with contextlib.suppress(_Waited), _patched():
            sys.setprofile(_sees_sleep)
            yield
    finally:
        sys.setprofile(profile)
        found, _state.found = _state.found, None
    assert not found, (
        f"{what} blocks in {found[0]}, and all requests wait for the scheduler's loop meanwhile: {instead}"
    )


def _waits(name: str) -> None:
    found = getattr(_state, "found", None)
    if found is not None:
        found.append(name)
        raise _Waited


def _sees_sleep(frame: FrameType, event: str, called: Any) -> None:
    """By the function that is called, since a module may have imported it under a name of its own."""
    if event == "c_call" and called is time.sleep:
        _waits("time.sleep")


def _leave_alone() -> None:
    """Let a process that was forked meanwhile wait."""
    _state.found = None
    sys.setprofile(None)


@cache
def _listen() -> None:
    os.register_at_fork(after_in_child=_leave_alone)
    sys.addaudithook(_hear)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS and not _at_once(event, args):
        _waits(event)
    if event == "open" and not getattr(_state, "files", True) and _writes(args):
        _waits(f"open({args[0]!r})")


def _writes(args: tuple[Any, ...]) -> bool:
    """Return whether a file is opened to write to; devices such as /dev/null do not count."""
    path, _, flags = args
    return bool(flags & (os.O_WRONLY | os.O_RDWR)) and isinstance(path, str) and not path.startswith("/dev/")


def _at_once(event: str, args: tuple[Any, ...]) -> bool:
    """Return whether it is a connection that does not wait: begun only, without a handshake, or to a process of this
    machine, such as the one that forks others.
    """
    if event != "socket.connect":
        return False
    sock: socket.socket = args[0]
    return sock.gettimeout() == 0 or sock.type == socket.SOCK_DGRAM or sock.family == getattr(socket, "AF_UNIX", None)


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Patch the calls that wait without an audit event. A time-out of 0 only looks, and so does a socket that does not
    block.
    """
    # `multiprocessing` waits by others than the default.
    names = ("DefaultSelector", "PollSelector", "SelectSelector")
    selecting = {getattr(selectors, name, selectors.DefaultSelector) for name in names}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(threading.Thread, "start", _unwatched(threading.Thread.start)))
        for cls, name in (
            (threading.Condition, "wait"),
            (threading.Thread, "join"),
            (subprocess.Popen, "wait"),
            (multiprocessing.process.BaseProcess, "join"),
            *((cls, "select") for cls in selecting),
        ):
            stack.enter_context(_guarded(cls, name, _timeout_given))
        for name in ("recv", "recv_into"):
            stack.enter_context(_guarded(socket.socket, name, _timeout_of_socket))
        for name in ("recv", "recv_bytes", "recv_bytes_into"):
            stack.enter_context(_guarded(multiprocessing.connection.Connection, name, _timeout_of_connection))
        yield


def _guarded(cls: type[Any], name: str, timeout: Callable[..., float | None]) -> Any:
    """Patch a method so that it does not wait. `timeout` says how long it would, by its arguments; None: for ever."""
    original = getattr(cls, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        limit = timeout(self, *args, **kwargs)
        if limit is None or limit > 0:
            _waits(f"{cls.__name__}.{name}")
        return original(self, *args, **kwargs)

    return mock.patch.object(cls, name, call)


def _timeout_given(self: Any, timeout: float | None = None) -> float | None:
    return timeout


def _timeout_of_socket(self: socket.socket, *args: Any, **kwargs: Any) -> float | None:
    return self.gettimeout()


def _timeout_of_connection(self: multiprocessing.connection.Connection, *args: Any, **kwargs: Any) -> float | None:
    return 0 if self.poll(0) else None


def _unwatched(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Let threads be started: `start` waits a moment for the thread to be there."""

    def started(self: threading.Thread) -> None:
        found, _state.found = getattr(_state, "found", None), None
        try:
            start(self)
        finally:
            _state.found = found

    return started
