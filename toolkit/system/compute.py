"""The number of threads for computations, and which of them come first."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time

import torch

from pegboard.toolkit.system.cores import usable_cores

LESS = 10
"""Steps of niceness: such a thread gets a tenth of a core that another one wants, and what is left."""
PIECE = 0.0005
"""Seconds that a thread which gives way computes before it rests, while others compute."""
REST = 9
"""Seconds that it rests for each second that it has computed: the tenth again, but in small pieces."""
MOST = 4 * PIECE
"""Seconds of work that it rests for at once: a piece that could not be cut holds up no load for long."""


class _Clocks(threading.local):
    """Seconds that this thread (`own`) and the whole process (`all`) had computed when this thread last rested, if it
    gives way, and the time (`now`) then.
    """

    gives_way = False
    own = all = now = 0.0

    def read(self) -> None:
        self.own, self.all, self.now = time.thread_time(), time.process_time(), time.monotonic()


_clocks = _Clocks()
_cores = functools.cache(usable_cores)


def compute_alone() -> None:
    """Let the calling thread do all that it computes with torch by itself, and no other thread.

    What `torch.set_num_threads` is told counts for the calling thread, and for all that compute for the first time
    after it. So a thread that goes away again sets it back for those; what begins to compute in between stays alone,
    too.
    """
    threads = torch.get_num_threads()  # now this thread has its number, and takes no later one
    torch.set_num_threads(1)
    back = threading.Thread(target=torch.set_num_threads, args=(threads,))
    back.start()
    back.join()


def give_way() -> None:
    """Let the calling thread compute in what others leave of the cores, for good: work in the background, beside steps.
    Only Linux has priorities of threads.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LESS)
    _clocks.gives_way = True
    _clocks.read()


def rest() -> None:
    """Sleep, if the calling thread gives way, has computed for `PIECE` seconds since it last did, and other threads of
    the process have computed as long meanwhile, so that hardly a core was free. To be called between pieces of work
    that are shorter than that.

    Its priority alone holds up a step by whole time slices of the system, several milliseconds: threads that compute
    together wait for the one whose core is taken.
    """
    if not _clocks.gives_way:
        return
    worked = time.thread_time() - _clocks.own
    if worked < PIECE:
        return
    computed, seconds = time.process_time() - _clocks.all, time.monotonic() - _clocks.now
    if computed >= 2 * worked and computed >= (_cores() - 0.5) * seconds:
        time.sleep(REST * min(worked, MOST))
    _clocks.read()
