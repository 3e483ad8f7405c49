"""Web pages of other origins: what a browser may have sent for one, and the names under which a server may be asked."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest

if TYPE_CHECKING:
    from starlette.types import Scope

    from pegboard.plugins.http_guard.hosts import Hosts

_WANTED = frozenset({b"host", b"origin", b"sec-fetch-site"})
_HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})


class Origins:
    """Refuses requests that a page of another origin may have sent, unless `allowed` has the origin, or "*"; and those
    for a host that `hosts`, if given, does not know. With keys (`keyed`) a page needs one that it does not have.
    """

    def __init__(self, allowed: Collection[str], hosts: Hosts | None, *, keyed: bool) -> None:
        self._allowed = frozenset(allowed)
        self._hosts = hosts
        self._keyed = keyed

    def refusal(self, scope: Scope) -> InvalidRequest | None:
        """Return why a request is refused; None where it is not."""
        headers = {name: value for name, value in scope["headers"] if name in _WANTED}
        if self._hosts is not None and (error := self._hosts.refusal(headers.get(b"host"))):
            return error
        if self._is_foreign(scope["method"], headers) and not self._is_allowed(headers.get(b"origin", b"")):
            return InvalidRequest(
                "pages of other origins may not use this server, unless server.cors.allow_origins names them",
                status=403,
                code="cross_site",
            )
        return None

    def _is_foreign(self, method: str, headers: dict[bytes, bytes]) -> bool:
        """Return whether a page of another origin sent this: browsers let any page send some requests, and only keep
        the answer from it. They say so in Sec-Fetch-Site, but not to other machines without TLS, and older browsers
        never do; there the Origin must tell, and so it must for pages of the same site, whose origin is another one:
        another port of this machine is. With keys it need not: such a page knows none.
        """
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if site is not None and method in _HARMLESS:
            return False
        if site not in (None, b"same-site"):
            return site == b"cross-site"
        if origin is None or self._keyed or method == "OPTIONS":
            return False
        return not is_own_origin(origin, headers.get(b"host"))

    def _is_allowed(self, origin: bytes) -> bool:
        return "*" in self._allowed or origin.decode("latin-1") in self._allowed


def is_own_origin(origin: bytes, host: bytes | None) -> bool:
    """Return whether a page of this origin came from the server that a request with this Host is for. The scheme does
    not count: something in front of the server may speak TLS.
    """
    _, found, authority = origin.partition(b"://")
    return bool(found) and host is not None and authority.lower() == host.lower()
