"""How much an object keeps alive, counted and not timed: for tests that something stops growing."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

_SHARED = (type, ModuleType, logging.Logger, logging.Handler)
_MOST = 1 << 20
"""Bytes that a history may come to before it counts as one without an end."""


def footprint(root: object, *others: object) -> int:
    """Return bytes of all that is reached from `root`, `root` included. Classes, modules, functions (but for what they
    close over) and all that is reached through `others` alone are not its own.
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


def growth(work: Callable[[], None], slack: int, root: object, *others: object) -> int:
    """By how many bytes `root` grows while it does the same work again: at most `slack` where that ends before it
    keeps a mebibyte more, as with a history of the last few thousand.
    """
    size = start = footprint(root, *others)
    while True:
        work()
        before, size = size, footprint(root, *others)
        if size - before <= slack or size - start > _MOST:
            return size - before


def with_class(owner: object) -> list[object]:
    """Return an object and what its classes hold beside methods, such as caches of them; those of the core do not
    count.
    """
    classes = [cls for cls in type(owner).__mro__ if not cls.__module__.startswith(("pegboard.core.", "builtins"))]
    values = [value for cls in classes for name, value in vars(cls).items() if not name.startswith("__")]
    return [owner, *values]


def growing(work: Callable[[], None], owner: object) -> str:
    """Return which attributes of `owner` grow while it works, as words for a message: " (self.index)", or none. Its
    `ctx` and `options` are not its own.
    """
    others = (owner, getattr(owner, "ctx", None), getattr(owner, "options", None))
    sizes = [{name: footprint(value, *others) for name, value in _own(owner)}]
    work()
    sizes.append({name: footprint(value, *others) for name, value in _own(owner)})
    names = [f"self.{name}" for name, size in sizes[1].items() if size > sizes[0].get(name, 0)]
    return f" ({', '.join(names)})" if names else ""


def _own(owner: object) -> list[tuple[str, object]]:
    return [(name, value) for name, value in vars(owner).items() if name not in ("ctx", "options")]
