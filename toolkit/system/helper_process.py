"""For code that uses helper processes: waiting for one, and finding out why it ended.

A helper runs what a client sent, so that a crash or an endless loop costs nothing but the helper. But it may also be
killed or stopped from outside (the kernel short of memory, an operator), and the client is not at fault.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

LOOK_SECONDS = 0.25
"""How often a thread that waits for a helper looks after it."""
LEAST_SHARE, LEAST_SECONDS = 0.1, 1.0
"""A helper was held up from outside where it computed for less than this share of its time, and less than so long."""

OWN_SIGNALS = frozenset(
    {
        signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS,
        signal.SIGALRM, signal.SIGPROF, signal.SIGVTALRM, signal.SIGXCPU,
    }
)  # fmt: skip
"""Signals by which a process ends through what it did itself, its timers included."""


class HelperLost(Exception):
    """A helper was killed or stopped from outside, or got no computing time: an accident of the server's."""


def ended_itself(returncode: int | None) -> bool:
    """Return whether a process with this status, as of `Popen.returncode`, ended through its own doing."""
    return returncode is not None and (returncode >= 0 or -returncode in OWN_SIGNALS)


def stopped(pid: int) -> bool:
    """Return whether the process is stopped (SIGSTOP, a debugger). False where the system does not say."""
    return _stat(pid)[:1] in (["T"], ["t"])


def computed(pid: int) -> float | None:
    """Return seconds of computing time that the process has taken; None where the system does not say."""
    fields = _stat(pid)
    if len(fields) < 13:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Return what the system says of a process, from its state on; empty where it says nothing."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return []
    # The name in front may hold anything, blanks and brackets included.
    return text.rpartition(")")[2].split()


class Watch:
    """One piece of work of a helper: it may take `seconds` from now on. `look` is called now and then meanwhile,
    and may raise.
    """

    def __init__(self, pid: int, seconds: float, look: Callable[[float], None] | None = None) -> None:
        self._pid = pid
        self._seconds = seconds
        self._look = look
        self._start = time.monotonic()
        self._computed = computed(pid)

    def wait(self, file: int, event: int) -> None:
        """Until the file is ready for the event. Raises TimeoutError where the helper's time is over, HelperLost where
        it is stopped or hardly got to compute meanwhile.
        """
        poll = select.poll()
        poll.register(file, event)
        while True:
            left = self._start + self._seconds - time.monotonic()
            if poll.poll(max(0.0, min(left, LOOK_SECONDS)) * 1000):
                return
            if stopped(self._pid):
                raise HelperLost("it was stopped")
            if left <= 0:
                raise self._over()
            if self._look is not None:
                self._look(self._seconds - left)

    def _over(self) -> Exception:
        now = computed(self._pid)
        least = min(self._seconds * LEAST_SHARE, LEAST_SECONDS)
        if now is None or self._computed is None or now - self._computed >= least:
            return TimeoutError()
        return HelperLost("it got no computing time")
