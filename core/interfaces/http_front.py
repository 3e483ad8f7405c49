"""HttpGuard: what a plugin's hook `guard_http` returns to protect the HTTP server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import socket
    import ssl

    import uvicorn
    from starlette.types import ASGIApp, Scope

    from pegboard.core.interfaces.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class HttpFront:
    """The server to protect: its listening socket, whether requests need a key, and its TLS context, None for plain
    HTTP.
    """

    listener: socket.socket
    keyed: bool
    tls: ssl.SSLContext | None = None


class Accepting(Protocol):
    """A loop that accepts connections."""

    def close(self) -> None:
        """Accept no more, and end connections that have no protocol yet. The socket stays open: new clients wait."""


class HttpGuard:
    """Base of guards. Override what is needed: the server calls nothing else, and a guard costs what it does.

    From the network to the routes a request passes: `accept`, `refuse`, the keys, `server.max_body_bytes`, `wrap`.
    """

    def refuse(self, scope: Scope) -> InvalidRequest | None:
        """Return why the server refuses a request, None where it does not. Called for each HTTP request, before its key
        is checked and before any of its body is read. ``scope["state"][NEEDED_LEVEL]`` says what its route needs.
        """
        return None

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return an ASGI application around `app`, the routes. Called once. For each request that has passed the keys,
        ``scope["extensions"][MOST_BODY]`` is the most bytes of its body. It may raise InvalidRequest in place of an
        answer.
        """
        return app

    def accept(self, front: HttpFront, server: uvicorn.Server) -> Accepting | None:
        """Accept the connections of `front.listener`, in place of the server: in the event loop, once. Each gets a
        protocol made of the config and the states of `server`. None leaves that to the next guard, and to the server.
        """
        return None
