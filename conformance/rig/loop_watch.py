"""Notes calls that hold up an event loop, by what they are and not by how long they take."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from socket import socket
from types import CodeType, FrameType
from typing import Any

import jinja2

_OURS = str(Path(__file__).parent)


def on_loop() -> bool:
    """Return whether this thread is running an event loop just now."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def caller() -> str:
    """Return where the nearest frame outside of the suites and the standard library is."""
    frame: Any = sys._getframe(1)
    library = str(Path(asyncio.__file__).parents[1])
    while frame is not None:
        name = frame.f_code.co_filename
        skipped = name.startswith(_OURS) or (name.startswith(library) and "site-packages" not in name)
        if not skipped and "jinja2" not in name and not name.startswith("<"):
            return f"{Path(name).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


RENDER = "use `await render_chat(...)` of pegboard.toolkit.chat.rendering, which renders apart (docs/decisions/0016)"
TOKENIZE = "use `await self.client.tokenize([text])`"
SLEEP = "use `await asyncio.sleep(...)`"
CONNECT = "use a client for asyncio, or `await asyncio.to_thread(...)`"

_WAITING = ("connect", "recv", "recv_into", "sendall", "accept")


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Collect what this thread, which runs a loop, waits for meanwhile: a sleep, a connection, a template."""
    found: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            if arg is time.sleep:
                found.append(f"time.sleep at {caller()}: {SLEEP}")
            elif _waits(arg):
                found.append(f"waiting for a connection at {caller()}: {CONNECT}")
        elif event == "call" and frame.f_code in _TEMPLATES:
            found.append(f"a chat template at {caller()}: {RENDER}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)


def _waits(function: Any) -> bool:
    """Return whether a built-in function waits for a connection."""
    of = getattr(function, "__self__", None)
    return isinstance(of, socket) and function.__name__ in _WAITING and of.gettimeout() != 0.0


def _codes(*functions: Any) -> frozenset[CodeType]:
    return frozenset(one.__code__ for one in functions)


_TEMPLATES = _codes(jinja2.Environment.compile, jinja2.Template.render)
