"""A guard of a listening socket."""

from __future__ import annotations

import socket
from typing import Any

from pegboard.core.config.sections import ServerSection
from pegboard.core.interfaces.http_front import HttpFront
from pegboard.plugins.http_guard.guard import Guard


def guarding(listener: socket.socket, *, keyed: bool = False, **server: Any) -> tuple[Guard, HttpFront]:
    """Return a guard with these settings of the server, and what it guards."""
    front = HttpFront(listener, keyed)
    return Guard(ServerSection(**server), front), front
