"""Which addresses media may be fetched from: those of the public internet, under whatever name."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Sequence[str]]
"""The addresses of a name, for a port. Raises OSError where there are none."""

_UNICAST = ipaddress.IPv6Network("2000::/3")
_REFUSED = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # of protocols, and the metadata of one cloud
            "192.88.99.0/24",  # relays to IPv6
            "168.63.129.16/32",  # public by its number, and the host of a virtual machine in one cloud
            "224.0.0.0/3",
            "2001::/23",  # of protocols: Teredo, which carries an IPv4 address, and others
            "2001:db8::/32",
            "2002::/16",  # 6to4, which carries an IPv4 address
            "3fff::/20",
        ),
    )
)
_NUMBER = re.compile(r"\d+|0[xX][\da-fA-F]*")
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")


def is_public(address: Address) -> bool:
    """Return whether an address is one of the public internet. None is that carries another address: IPv4 in IPv6, as
    mapped, translated (NAT64) or in a tunnel (6to4, Teredo); nor one with a zone.
    """
    if isinstance(address, ipaddress.IPv6Address) and (address.scope_id or address not in _UNICAST):
        return False
    return address.is_global and not any(address in one for one in _REFUSED if one.version == address.version)


def resolve(host: str, port: int) -> list[str]:
    """Return the addresses that the system knows for a name."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def host_name(host: str) -> str | None:
    """Return a host as it is asked for, in lower case and without a dot at its end: a name in ASCII, or an address as
    it is usually written. None for anything else, such as 127.1, 0x7f000001 and 2130706433, which some read as
    addresses.
    """
    if ":" in host:
        try:
            return None if "%" in host else str(ipaddress.IPv6Address(host))
        except ValueError:
            return None
    try:
        name = host.encode("idna").decode("ascii").lower().removesuffix(".")
    except UnicodeError:
        return None
    if _NUMBER.fullmatch(name.rpartition(".")[2]):
        try:
            return str(ipaddress.IPv4Address(name))
        except ValueError:
            return None
    return name if _NAME.fullmatch(name) else None


def is_allowed_name(host: str, allowed: Sequence[str]) -> bool:
    """Return whether a host is among the allowed ones: exact, or below one that begins with a dot. All are where none
    is listed.
    """
    listed = [one.lower() for one in allowed]
    return not listed or any(host.endswith(one) if one.startswith(".") else host == one for one in listed)
