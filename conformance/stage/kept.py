"""What a stage keeps: the entries of its containers, and of what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Stage

MAX_DEPTH = 6


def _inside(value: object, depth: int = 0) -> Iterator[object]:
    """Yield the entries of all containers that an object of the stage holds, requests not entered."""
    if depth > MAX_DEPTH or isinstance(value, (str, bytes, np.ndarray, type, Req)):
        return
    if isinstance(value, Mapping):
        items: list[object] = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)
    elif type(value).__module__.partition(".")[0] in ("builtins", "torch", "numpy", "pathlib", "types", "functools"):
        return
    else:
        items = list(getattr(value, "__dict__", {}).values())
        items += [getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
        for item in items:
            yield from _inside(item, depth + 1)
        return
    for item in items:
        yield item
        yield from _inside(item, depth + 1)


def size(stage: Stage) -> int:
    """Return how many entries the stage's containers have."""
    return sum(1 for _ in _inside(stage))


def holds(stage: Stage, rid: str) -> int:
    """Return how often the stage's containers have a request, itself or by its id."""
    named = (item.rid if isinstance(item, Req) else item for item in _inside(stage))
    return sum(1 for name in named if isinstance(name, str) and name == rid)
