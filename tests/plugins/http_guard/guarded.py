"""A guard of a listening socket."""

from __future__ import annotations

import socket
from collections.abc import Collection
from typing import Any

from pegboard.core.interfaces.http_front import HttpFront
from pegboard.plugins.http_guard.guard import Guard
from pegboard.plugins.http_guard.hosts import Hosts
from pegboard.plugins.http_guard.options import GuardFields
from pegboard.plugins.http_guard.origins import Origins


def guarding(
    listener: socket.socket, *, keyed: bool = False, origins: Collection[str] = (), **bounds: Any
) -> tuple[Guard, HttpFront]:
    """Return a guard with these bounds, and what it guards."""
    fields = GuardFields(**bounds)
    hosts = None if keyed else Hosts.of("127.0.0.1", fields.allowed_hosts, listener)
    return Guard(fields, Origins(origins, hosts, keyed=keyed)), HttpFront(listener, keyed)
