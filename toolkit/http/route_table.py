"""The access level that a request needs: an application's routes by method and path."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from starlette.routing import Match

from pegboard.toolkit.http.levels import Level, level_of, takes_any_size, takes_large

if TYPE_CHECKING:
    from starlette.routing import BaseRoute
    from starlette.types import Scope

STRICTNESS: dict[Level, int] = {"public": 0, "user": 1, "admin": 2}
UNDECLARED: Level = "admin"
"""The level of routes that declare none, and of paths that no route has."""


class FlatRoute(Protocol):
    """A route, or what FastAPI makes of one in a router inside of a router. One of plain ASGI has no methods, and one
    that is mounted may have no path.
    """

    path: str
    methods: Collection[str]

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return how well the route fits a request."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A route as the server sees it: its level, its own path with the names of parameters ("" for none), and whether it
    takes large bodies, and those of any size.
    """

    level: Level
    template: str
    large: bool = False
    streamed: bool = False


UNKNOWN = Entry(UNDECLARED, "")


class Routes:
    """The routes of an application, found in the order in which the application itself tries them.

    Routes may be added while nothing has been asked yet (hooks do); what comes later is noticed where it is added to
    the application itself.
    """

    def __init__(self) -> None:
        self._size = -1
        self._fixed: dict[tuple[str, str], Entry] = {}
        """Routes whose path holds no parameters, by method and path."""
        self._paths: dict[str, Entry] = {}
        """The strictest of those routes at a path, for methods that it does not take."""
        self._others: list[FlatRoute] = []

    def find(self, scope: Scope) -> Entry:
        """Return the route that will answer; UNKNOWN where none does."""
        routes = scope["app"].router.routes
        if len(routes) != self._size:
            self._learn(routes)
        entry = self._fixed.get((scope["method"], scope["path"]))
        return entry if entry is not None else self._search(scope)

    def _learn(self, routes: Sequence[BaseRoute]) -> None:
        every = list(flat(routes))
        self._fixed, self._paths = {}, {}
        self._others = [route for route in every if not _is_fixed(route)]
        for route in every:
            if _is_fixed(route):
                for method in route.methods:
                    # An earlier route with parameters may take this very path.
                    entry = _first(every, _probe(method, route.path)) or _entry(route)
                    self._fixed[method, route.path] = entry
                    if method == "GET":
                        # It answers HEAD as well, unless another route, or an application mounted there, takes that.
                        head = _first(every, _probe("HEAD", route.path)) or entry
                        self._fixed.setdefault(("HEAD", route.path), head)
                    self._paths[route.path] = _strictest([entry, self._paths.get(route.path, entry)])
        self._size = len(routes)

    def _search(self, scope: Scope) -> Entry:
        entry = _first(self._others, scope)
        if entry is None and scope["method"] == "HEAD":
            entry = _first(self._others, {**scope, "method": "GET"})
        if entry is not None:
            return entry
        partly = [_entry(route) for route in self._others if route.matches(scope)[0] is Match.PARTIAL]
        fixed = self._paths.get(scope["path"])
        return _strictest([*partly, *([fixed] if fixed else [])]) if partly or fixed else UNKNOWN


def flat(routes: Iterable[BaseRoute]) -> Iterator[FlatRoute]:
    """Yield every route with its own path, methods and dependencies, also those of routers inside of routers."""
    for route in routes:
        inside = getattr(route, "effective_route_contexts", None)
        every: Iterable[Any] = inside() if inside is not None else (route,)
        for one in every:
            # Plain ASGI routes of an included router keep what they have become in there.
            yield getattr(one, "starlette_route", None) or one


def allowed(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """Return the methods that a request's path takes."""
    found = {
        method
        for route in flat(routes)
        if route.matches(scope)[0] is not Match.NONE
        for method in getattr(route, "methods", None) or ()
    }
    return sorted(found | ({"HEAD"} if "GET" in found else set()))


def levels(routes: Iterable[BaseRoute]) -> dict[tuple[str, str], Level]:
    """Return the level of every route by method and path."""
    return {
        (method, route.path): level_of(route) or UNDECLARED
        for route in flat(routes)
        for method in sorted(getattr(route, "methods", None) or ("*",))
    }


def _is_fixed(route: FlatRoute) -> bool:
    return bool(getattr(route, "methods", None)) and "{" not in route.path


def _entry(route: FlatRoute) -> Entry:
    path = str(getattr(route, "path", ""))
    return Entry(level_of(route) or UNDECLARED, path, takes_large(route), takes_any_size(route))


def _first(routes: Iterable[FlatRoute], scope: Scope) -> Entry | None:
    return next((_entry(route) for route in routes if route.matches(scope)[0] is Match.FULL), None)


def _strictest(entries: list[Entry]) -> Entry:
    return max(entries, key=lambda one: STRICTNESS[one.level])


def _probe(method: str, path: str) -> dict[str, object]:
    return {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
