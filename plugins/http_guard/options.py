"""The keys of the config that the guard adds."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from pegboard.core.interfaces.options import PositiveInt, SectionFields

HostName = Annotated[str, Field(pattern=r"^(\*|[A-Za-z0-9._-]+|\[?([0-9A-Fa-f.]*:){2,}[0-9A-Fa-f.]*\]?)$")]
"""A name or an address, without a port."""
_ONE_OR_SEVERAL = BeforeValidator(lambda value: [value] if isinstance(value, str | int | float) else value)


class GuardFields(SectionFields):
    """Keys of `server`."""

    allowed_hosts: Annotated[tuple[HostName, ...], _ONE_OR_SEVERAL] = ()
    """Further names under which clients without a key may address the server (their Host header, without a port), such
    as the public name of a proxy in front of it; `*` is any. A server with keys does not look at them."""
    request_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that a client may take to send a request, headers and body together; a slower one gets 408. One that
    reads nothing of its answer for as long is cut off."""
    max_body_values: PositiveInt = 1024 * 1024
    """Most values in a request body: an item of a list counts one, a string four, a list, an object or a name in an
    object eight. More are answered with 413, before they are parsed."""
    max_bodies_bytes: PositiveInt = 64 * 1024 * 1024
    """Bytes that bodies larger than 64 KiB may hold together while they arrive and are made into requests. Without
    room, more of a body is not read; after 10 s it is answered with 503."""
    max_connections: PositiveInt = 4096
    """Most connections at once, and thereby HTTP requests. One more takes the place of an idle one, or is answered with
    503; health probes have places of their own."""
