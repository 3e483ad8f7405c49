"""The names under which a server may be asked, where no key keeps strangers out.

A web page may give its own name the address of this server (DNS rebinding). For the browser the server then is part of
the page's origin: the page sends what it likes and reads the answers. The Host header still has the page's name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.toolkit.system.log_lines import quoted

_PORT = re.compile(r":[0-9]*$")


class Hosts:
    """What a Host header may say. Ports do not matter: forwarding changes them, and rebinding cannot.

    A server that listens on loopback may be asked by `localhost` and loopback addresses; another one by the address
    that it listens on and this machine's name, or, listening on all addresses, by any address: rebinding needs a name.
    """

    def __init__(self, address: str, names: tuple[str, ...] = ()) -> None:
        self._address = _address(address)
        self._names = {_plain(name) for name in names} - {""}
        self._all = "*" in names
        if self._address is None or self._address.is_loopback or self._address.is_unspecified:
            self._names.add("localhost")

    @classmethod
    def of(cls, host: str, allowed: Collection[str], listener: socket.socket) -> Hosts:
        """As `server.host` and `server.allowed_hosts` of the config say, of a socket that listens."""
        address = str(listener.getsockname()[0])
        names = [host, *allowed]
        if (own := _address(address)) is not None and not own.is_loopback:
            machine = socket.gethostname()
            names += [machine, machine.partition(".")[0]]
        return cls(address, tuple(names))

    def refusal(self, host: bytes | None) -> InvalidRequest | None:
        """Return why a request with this Host is refused; None where it is not. Browsers never send one without."""
        if host is None or self._all:
            return None
        name = _plain(_PORT.sub("", host.decode("latin-1")))
        if name in self._names or self._is_ours(name):
            return None
        return InvalidRequest(
            f"this server is not called {quoted(name)}; if that is one of its names, server.allowed_hosts must have "
            "it, or the server needs a key",
            status=403,
            code="unknown_host",
        )

    def _is_ours(self, name: str) -> bool:
        asked, own = _address(name), self._address
        if asked is None or own is None:
            return False
        return asked == own or own.is_unspecified or (own.is_loopback and asked.is_loopback)


def _plain(name: str) -> str:
    return name.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
