"""Who takes part where: the points of hooks and the methods of stages, with the plugins that are in them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.engine_view import Listener, ShownPoint
from pegboard.core.interfaces.hooks import POINTS

if TYPE_CHECKING:
    from pegboard.core.interfaces.frontend import FrontendStage
    from pegboard.core.interfaces.stage import DevicePart, Stage

_COST = "one truth test where no stage overrides it"


def takes_part(kind: type, part: object, point: str) -> bool:
    """Return whether a stage overrides a method of its kind."""
    return getattr(type(part), point) is not getattr(kind, point)


def hook_points(listeners: Callable[[str], Sequence[tuple[str, str]]]) -> Iterator[ShownPoint]:
    """Yield every point of POINTS. `listeners` gives the plugins and classes that implement a hook, in their order."""
    for point in POINTS:
        who = tuple(Listener(plugin, name) for plugin, name in listeners(point.name))
        yield ShownPoint(point.name, point.process, point.when, point.cost, who)


def stage_points(kind: type, parts: Sequence[Stage | DevicePart | FrontendStage], process: str) -> Iterator[ShownPoint]:
    """Yield the methods of a kind of stages in their order, each with the stages that override it."""
    for name, method in vars(kind).items():
        if inspect.isfunction(method):
            having = [part for part in parts if takes_part(kind, part, name)]
            who = tuple(Listener(part.name, f"{type(part).__module__}:{type(part).__qualname__}") for part in having)
            when = " ".join(re.split(r"[.:;](?:\s|$)", inspect.getdoc(method) or "")[0].split())
            yield ShownPoint(f"{kind.__name__}.{name}", process, when[:1].lower() + when[1:], _COST, who)
