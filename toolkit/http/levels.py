"""The access level of a route (PUBLIC, USER, ADMIN), its body size (LARGE, STREAMED), and the key of a request."""

from __future__ import annotations

from typing import Literal

from fastapi import Depends, Request

ASKED_BY = "asked_by"
"""In a scope's state: what `principal_of` gives."""
NEEDED_LEVEL = "needed_level"
"""In a scope's state: the Level that the route of the request needs; `admin` where there is no such route."""


def principal_of(request: Request) -> str:
    """Return the name of the API key that a request brings, which tells nothing of the key itself: for routes that keep
    what no other key may read or change. "" on a server without keys.
    """
    return str(request.scope.get("state", {}).get(ASKED_BY, ""))


Level = Literal["public", "user", "admin"]


# Coroutines, because FastAPI calls plain functions in a thread.


async def _public() -> None:
    """Mark a route that needs no key."""


async def _user() -> None:
    """Mark a route that needs the API key, or the admin key, where one is set."""


async def _admin() -> None:
    """Mark a route that needs the admin key, where a key is set."""


PUBLIC, USER, ADMIN = Depends(_public), Depends(_user), Depends(_admin)
"""Levels of routes: ``router.post("/flush", dependencies=[ADMIN])``, or ``api_router(dependencies=[USER])`` for those
that say nothing themselves (the last one counts). The server enforces them; a route without any is for admins."""
_LEVELS: dict[object, Level] = {_public: "public", _user: "user", _admin: "admin"}


async def _large() -> None:
    """Mark a route that takes large bodies."""


LARGE = Depends(_large)
"""Declares, like a level, that a route takes bodies up to `server.max_body_bytes`: prompts. Others take 1 MiB."""


async def _streamed() -> None:
    """Mark a route that reads its body piece by piece."""


STREAMED = Depends(_streamed)
"""Declares that a route takes a body of any size, and keeps none of it in memory: a file. It should be for admins."""


def is_admin(request: Request) -> bool:
    """Return whether a request may have what is for admins: it brings the admin key, or the server has no keys. For
    routes that tell users less.
    """
    keys = getattr(request.app.state, "keys", None)
    return keys is None or keys.refusal("admin", dict(request.scope["headers"])) is None


def level_of(route: object) -> Level | None:
    """Return the level that a route declares; None where it declares none."""
    found = [_LEVELS.get(one.dependency) for one in getattr(route, "dependencies", None) or ()]
    return next((level for level in reversed(found) if level is not None), None)


def takes_large(route: object) -> bool:
    """Return whether a route declares LARGE."""
    return _declares(route, _large)


def takes_any_size(route: object) -> bool:
    """Return whether a route declares STREAMED."""
    return _declares(route, _streamed)


def _declares(route: object, mark: object) -> bool:
    return any(one.dependency is mark for one in getattr(route, "dependencies", None) or ())
