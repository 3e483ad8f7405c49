"""Compile the native runner for this machine ahead of its first use: python -m pegboard.plugins.cpu_native"""

from __future__ import annotations

import logging
import sys

from pegboard.plugins.cpu_native.library import NativeError, build, choose


def main() -> int:
    """Exit status 1, with the reason and the remedy, where that is not possible. Needs no torch, so it is quick."""
    try:
        instructions = choose("auto")
        sys.stdout.write(f"native runner for {instructions}: {build(instructions)}\n")
    except NativeError as error:
        sys.stderr.write(f"no native runner: {error}{error.said}\n")
        return 1
    return 0


if __name__ == "__main__":
    # Compiling takes long enough to be told of.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main())
