"""Notes calls that hold up an event loop, by what they are and not by how long they take."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).parent)
_notes: list[str] | None = None
_hooked = False


def on_loop() -> bool:
    """Whether this thread is running an event loop just now."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def caller() -> str:
    """Where the nearest frame outside of the suites and the standard library is."""
    frame: Any = sys._getframe(1)
    library = str(Path(asyncio.__file__).parents[1])
    while frame is not None:
        name = frame.f_code.co_filename
        skipped = name.startswith(_OURS) or (name.startswith(library) and "site-packages" not in name)
        if not skipped and "jinja2" not in name and not name.startswith("<"):
            return f"{Path(name).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return "?"


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Collects what blocks a loop meanwhile: sleeping, waiting for a connection, compiling a template."""
    global _notes, _hooked
    if not _hooked:
        # Python keeps a hook for ever; this one does nothing while nobody watches.
        _hooked = True
        sys.addaudithook(_audit)
    _notes = found = []
    try:
        yield found
    finally:
        _notes = None


RENDER = "use `await render_chat(...)` of pegboard.core.toolkit.rendering, which renders apart (docs/decisions/0016)"
TOKENIZE = "use `await self.client.tokenize([text])`"

_EVENTS = {
    "time.sleep": ("time.sleep", "use `await asyncio.sleep(...)`"),
    "socket.connect": (
        "a connection that is waited for",
        "use a client for asyncio, or `await asyncio.to_thread(...)`",
    ),
    "compile": ("a chat template", RENDER),
}


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _notes is None or event not in _EVENTS or not on_loop():
        return
    if event == "compile" and args[1] != "<template>":
        return
    if event == "socket.connect" and args[0].gettimeout() == 0.0:
        return
    what, instead = _EVENTS[event]
    _notes.append(f"{what} at {caller()}: {instead}")
