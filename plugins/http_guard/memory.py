"""Freed memory back to the system, where the C library would keep it: glibc."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

TRIM_AFTER = 1.0
"""Seconds until freed memory goes back; what else is freed meanwhile goes with it."""
OWN_BLOCK = 1024 * 1024
"""Bytes from which on an allocation is a mapping of its own, which goes back when it is freed."""
KEPT = 8 * OWN_BLOCK
"""Most free bytes that an arena keeps at its end."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def _glibc(name: str) -> Any:
    """Return a function of glibc; None where there is another C library."""
    return getattr(ctypes.CDLL(None), name, None)


def bound_kept_memory() -> None:
    """Fix how much freed memory this process keeps. By itself glibc raises both bounds with each large block that is
    freed, up to 32 and 64 MiB, in each thread's arena.
    """
    if _glibc("malloc_trim") is not None:
        mallopt = _glibc("mallopt")
        mallopt(_M_MMAP_THRESHOLD, OWN_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, KEPT)


class MemoryReturn:
    """Gives back what lies free between blocks that are in use."""

    def __init__(self) -> None:
        self._trim = _glibc("malloc_trim")
        self._pending = False

    def soon(self) -> None:
        """Do so in TRIM_AFTER, in a thread: it takes milliseconds."""
        if self._trim is not None and not self._pending:
            self._pending = True
            asyncio.get_running_loop().call_later(TRIM_AFTER, self._begin)

    def _begin(self) -> None:
        self._pending = False
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
