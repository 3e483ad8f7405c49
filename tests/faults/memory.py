"""The memory that a piece of a test takes, in bytes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def little_memory(most: int = 512 * 2**20) -> Iterator[None]:
    """What runs in it takes at most so many bytes beyond what there was, whatever ran before it."""
    before = peak(anew=True)
    yield
    grown = peak() - before
    assert grown < most, f"{grown:,} bytes"


def peak(process: int | str = "self", *, anew: bool = False) -> int:
    """The most bytes that a process, this one or another, has had in memory; counted anew from now on."""
    if anew:
        Path(f"/proc/{process}/clear_refs").write_text("5")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
