"""What every test of native code needs: a module that imports this is skipped where nothing can be compiled or run."""

from __future__ import annotations

import pytest

from pegboard.plugins.cpu_native.library import NativeError, compiler
from tests.numeric import native_sets

try:
    compiler()
except NativeError as error:
    pytest.skip(str(error), allow_module_level=True)
SETS = native_sets()
if not SETS:
    pytest.skip("this CPU has none of the instruction sets", allow_module_level=True)

EACH = (SETS[0], *(pytest.param(name, marks=pytest.mark.full) for name in SETS[1:]))
"""The sets as parameters: `make setup` compiles the best one, and a compiler needs 15 s for each of the others."""
