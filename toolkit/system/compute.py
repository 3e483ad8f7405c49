"""The number of threads for computations."""

from __future__ import annotations

import threading

import torch


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
