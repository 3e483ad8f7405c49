"""How compute threads wait for each other.

OpenMP's threads spin at every barrier by default. As soon as anything else wants a core - the API process, a
tokeniser, a neighbour - a spinning thread keeps the one it waits for off its core for a whole time slice: a decode
step of the demo model on two contended cores took forty times as long. Threads that yield at once lose next to
nothing on a quiet machine.
"""

from __future__ import annotations

import os

YIELDING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def yield_when_waiting() -> None:
    """Let this process's OpenMP threads yield instead of spin, unless the environment says how they wait.

    Takes effect only before the first import of torch, since OpenMP reads its settings when it is loaded.
    """
    if not any(name in os.environ for name in YIELDING):
        os.environ.update(YIELDING)
