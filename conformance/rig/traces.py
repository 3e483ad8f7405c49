"""What a plugin still keeps of a request that is gone: found by following references, whatever the objects print."""

from __future__ import annotations

import gc
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

from pegboard.core.interfaces.req import Req

_OPAQUE = (type, types.ModuleType, types.FrameType, types.CodeType, logging.Logger, logging.Handler)
_AT_MOST = 500_000
"""Objects that are looked at in one place. Where there are more, nothing can be said of it."""


def traces(owner: object, req: Req) -> list[str]:
    """Places that lead to the request, its rid (also as a part of a text) or its id(): attributes of `owner`, of its
    classes and of their modules. `options` and `ctx` are not its own. Raises AssertionError for a place that leads to
    too much to look through.
    """
    return [place for place, value in _places(owner) if _leads_to(place, value, req, owner)]


def _places(owner: Any) -> Iterator[tuple[str, object]]:
    for name, value in _attributes(owner).items():
        if name not in ("options", "ctx"):
            yield f"self.{name}", value
    for cls in type(owner).__mro__:
        if cls is object or cls.__module__.startswith("pegboard.core."):
            continue
        yield from ((f"{cls.__name__}.{name}", value) for name, value in vars(cls).items() if not _dunder(name))
        around = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
        yield from ((f"{cls.__module__}.{name}", value) for name, value in around.items() if not _dunder(name))


def _attributes(owner: Any) -> dict[str, object]:
    slots = [name for cls in type(owner).__mro__ for name in getattr(cls, "__slots__", ())]
    return {**{name: getattr(owner, name) for name in slots if hasattr(owner, name)}, **getattr(owner, "__dict__", {})}


def _dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _leads_to(place: str, start: object, req: Req, owner: Any) -> bool:
    others = (owner, getattr(owner, "ctx", None), getattr(owner, "options", None))
    seen: dict[int, object] = {id(one): one for one in others}
    todo = [start]
    while todo:
        if len(seen) >= _AT_MOST:
            raise AssertionError(
                f"{place} leads to more than {_AT_MOST} objects, so it cannot be told whether the request is one: "
                "let the class under test keep less there"
            )
        one = todo.pop()
        if one is req or _names(one, req):
            return True
        if id(one) not in seen and not isinstance(one, _OPAQUE):
            seen[id(one)] = one
            todo += _inside(one)
    return False


def _names(one: object, req: Req) -> bool:
    if isinstance(one, str):
        return one == req.rid or (len(req.rid) >= 8 and req.rid in one)
    if isinstance(one, bytes):
        return one == req.rid.encode()
    return type(one) is int and one == id(req)


def _inside(one: object) -> list[object]:
    """Return what an object refers to; of a function what it has kept, and not the module around it."""
    if isinstance(one, types.FunctionType):
        return [one.__closure__, one.__defaults__, one.__kwdefaults__, one.__dict__]
    if isinstance(one, dict):
        return [*one.keys(), *one.values()]  # the collector does not count keys that are texts
    return gc.get_referents(one)
