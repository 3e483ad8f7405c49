"""The number of threads for computations, and which of them come first."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

import torch

LESS = 10
"""Steps of niceness: such a thread gets a tenth of a core that another one wants, and what is left."""


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
