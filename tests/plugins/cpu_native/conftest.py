"""NATIVE_INSTRUCTIONS names the instruction set that tests here take for the best and only one of this machine."""

from __future__ import annotations

import os

from pegboard.plugins.cpu_native import library

if "NATIVE_INSTRUCTIONS" in os.environ:
    library.INSTRUCTION_SETS = (os.environ["NATIVE_INSTRUCTIONS"],)
    collect_ignore = ["test_library.py"]  # it is about looking for sets
