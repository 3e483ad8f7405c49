"""Media that misbehave while they are prepared, as they say themselves: for tests of what prepares them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO, cast

from pegboard.conformance.rig.media_toy import ToyProcessor
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.media.api import MediaShape, MediaSource

DRILL = b"DRILL "


class DrillProcessor(ToyProcessor):
    """The toy, whose files may be drills instead: ``DRILL die`` (the process crashes), ``hang``, ``hang in C`` (holding
    the interpreter), ``eat`` (memory), ``nest``, ``raise``, ``refuse``, ``print``, ``leave``, ``pour`` (pixels without
    end), ``lie`` (of the size), ``nothing`` (no shape), ``rave`` (nonsense to its parent) and ``flood`` (too much).
    ``slow SECONDS FILE`` writes the process's id to a file, waits and is a picture of one patch then.
    """

    def prepare(self, source: MediaSource, out: BinaryIO) -> MediaShape:
        data = source.file.read_bytes()
        if not data.startswith(DRILL):
            return super().prepare(source, out)
        word, _, rest = data.decode().removeprefix(DRILL.decode()).partition(" ")
        _drill(word, rest)
        if word == "pour":
            while True:
                out.write(bytes(1 << 20))
        if word == "slow":
            _wait(*rest.split())
        block = self.settings.block
        out.write(bytes(block * block * 3))
        if word == "nothing":
            # What no processor may return.
            return cast(MediaShape, None)
        return MediaShape((1, block, 2 * block if word == "lie" else block, 3), (1, 1, 1))


def _drill(word: str, rest: str) -> None:
    if word == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif word == "leave":
        sys.exit(3)
    elif word == "hang" and rest:
        # A library that spins without giving the interpreter back: nothing in Python can end it.
        sum(range(10**15))
    elif word == "hang":
        while True:
            pass
    elif word == "eat":
        held = [bytes(64 * 2**20)]
        while True:
            held.append(bytes(64 * 2**20))
    elif word == "nest":
        _drill(word, rest)
    elif word == "raise":
        raise RuntimeError("as asked")
    elif word == "refuse":
        raise InvalidRequest("this is refused, as asked", code="as_asked")
    elif word == "rave":
        os.write(0, b"\3\0\0\0abc")
    elif word == "flood":
        os.write(0, b"\0\0\0\x7f")
    elif word == "print":
        print("a library that talks on standard output")  # noqa: T201
        os.write(1, b"\0" * 64)


def _wait(seconds: str, begun: str) -> None:
    with Path(begun).open("a", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(float(seconds))
