"""Catches calls that wait where none may: sleeping, waiting for threads and processes, asking the network."""

from __future__ import annotations

import contextlib
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

_state = threading.local()


class _Waited(BaseException):
    """Ends the call that would wait; no `except Exception` of a plugin's stops it."""


@contextlib.contextmanager
def no_waiting(what: str) -> Iterator[None]:
    """Fail where this thread waits meanwhile. Starting a thread or a process is no waiting; other threads may."""
    _listen()
    _state.found = []
    profile = sys.getprofile()
    try:
        with contextlib.suppress(_Waited), _patched():
            sys.setprofile(_sees_sleep)
            yield
    finally:
        sys.setprofile(profile)
        found, _state.found = _state.found, None
    assert not found, (
        f"{what} blocks in {found[0]}, and all requests wait for the scheduler's loop meanwhile: let a thread or a "
        "process of your own do the work, and `poll` look how far it is"
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


@cache
def _listen() -> None:
    sys.addaudithook(lambda event, args: _waits(event) if event in _EVENTS else None)


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """What waits and is no audit event. A time-out of 0 only looks, and so does a socket that does not block."""

    def guarded(cls: type[Any], name: str, timeout: Callable[..., float | None]) -> Any:
        original = getattr(cls, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            limit = timeout(self, *args, **kwargs)
            if limit is None or limit > 0:
                _waits(f"{cls.__name__}.{name}")
            return original(self, *args, **kwargs)

        return mock.patch.object(cls, name, call)

    start = threading.Thread.start

    def started(self: threading.Thread) -> None:
        found, _state.found = getattr(_state, "found", None), None  # it waits a moment for the thread to be there
        try:
            start(self)
        finally:
            _state.found = found

    def given(self: Any, timeout: float | None = None) -> float | None:
        return timeout

    def of_socket(self: socket.socket, *args: Any, **kwargs: Any) -> float | None:
        return self.gettimeout()

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(threading.Thread, "start", started))
        for cls, name in (
            (threading.Condition, "wait"),
            (threading.Thread, "join"),
            (subprocess.Popen, "wait"),
            (selectors.DefaultSelector, "select"),
        ):
            stack.enter_context(guarded(cls, name, given))
        for name in ("recv", "recv_into"):
            stack.enter_context(guarded(socket.socket, name, of_socket))
        yield
