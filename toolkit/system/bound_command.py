"""Commands that end with the process that starts them, however it ends: the kernel kills them (man 2 prctl,
PR_SET_PDEATHSIG). A process that only waits for the end of its standard input would not notice it while it is stopped.
"""

from __future__ import annotations

import os
import sys

_PROGRAM = """\
import os, sys
from pegboard.toolkit.system.helper_child import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execv(sys.executable, [sys.executable, '-m', *sys.argv[2:]])
"""


def bound_command(module: str, *arguments: str) -> list[str]:
    """Return the command of ``python -m module`` in a process that ends with the thread that starts it. The thread must
    be one that stays: the kernel watches it, and not its process.
    """
    return [sys.executable, "-c", _PROGRAM, str(os.getpid()), module, *arguments]
