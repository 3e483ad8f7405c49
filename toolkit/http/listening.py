"""The socket of an HTTP server: opened before anything slow begins, with a warning if it is open to everyone."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Protocol

from pegboard.core.interfaces.errors import PegboardError, Temporary

BACKLOG = 2048
"""Connections that may wait to be accepted."""


class Address(Protocol):
    """Where to listen: the section `server` of a config. Port 0 picks a free one."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


def listen(server: Address) -> socket.socket:
    """Return a listening socket: a taken port is known before a model is loaded, also where two servers start at one
    time (two that are bound and do not listen yet share a port). Raises PegboardError saying what to do.
    """
    where = f"{server.host}:{server.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise PegboardError(f"server.host: {server.host!r} is not an address of this machine: {error}") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise PegboardError(f"server.host: {server.host!r} is not an address of this machine") from None
        remedy = f"choose another port (--set server.port={max(1024, min(server.port + 1, 65535))})"
        failure = Temporary if error.errno == errno.EADDRINUSE else PegboardError
        first = "stop what uses it, or " if failure is Temporary else ""
        raise failure(f"cannot listen on {where}: {error.strerror}; {first}{remedy}") from None
    return listener


def exposure(server: Address, listener: socket.socket, *, keyed: bool) -> str | None:
    """Return a warning where others than this machine can connect, and no key keeps them out."""
    address = ipaddress.ip_address(str(listener.getsockname()[0]).partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if (mapped or address).is_loopback or keyed:
        return None
    return (
        f"server.host is {server.host} and no key is set: all who reach this machine may use this server, and "
        "administer it; set server.api_key_file and server.admin_key_file"
    )
