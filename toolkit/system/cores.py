"""How many cores there are to compute with."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def usable_cores(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may keep busy: those that it may run on, or as many as its container's quota pays for."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = cpu_max.read_text("ascii").split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores
