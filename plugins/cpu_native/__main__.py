"""Compile the native runner ahead of its first use: python -m pegboard.plugins.cpu_native [INSTRUCTION SET ...]

Without arguments for this machine. Instruction sets by name (amx, avx512, avx2) are compiled on any x86-64 machine, for
an image that runs on others.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from pegboard.plugins.cpu_native.library import INSTRUCTION_SETS, NativeError, build, choose


def main(wanted: Sequence[str] = ()) -> int:
    """Exit status 1, with the reason and the remedy, where that is not possible. Needs no torch, so it is quick."""
    try:
        for instructions in wanted or [choose("auto")]:
            if instructions not in INSTRUCTION_SETS:
                raise NativeError(f"{instructions!r} is not one of {', '.join(INSTRUCTION_SETS)}")
            sys.stdout.write(f"native runner for {instructions}: {build(instructions)}\n")
    except NativeError as error:
        sys.stderr.write(f"no native runner: {error}{error.said}\n")
        return 1
    return 0


if __name__ == "__main__":
    # Compiling takes long enough to be told of.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main(sys.argv[1:]))
