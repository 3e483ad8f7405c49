"""How much an object keeps alive, counted and not timed: for tests that something stops growing."""

from __future__ import annotations

import gc
import sys
from types import FunctionType, ModuleType
from typing import Any

_SHARED = (type, ModuleType)


def footprint(root: object, *others: object) -> int:
    """Bytes of all that is reached from `root`, `root` included. Classes, modules, functions (but for what they close
    over) and all that is reached through `others` alone are not its own.
    """
    seen = {id(other) for other in others}
    todo: list[Any] = [root]
    size = 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, _SHARED):
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            todo += one.__closure__ or ()
            continue
        size += sys.getsizeof(one)
        todo += gc.get_referents(one)
        if isinstance(one, dict):
            todo += dict.keys(one)  # strings among them are none of the collector's business
    return size
