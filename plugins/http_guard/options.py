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
    """Further names of the server that clients without a key may use (their Host header, without a port), such as the
    name of a proxy in front of it; `*`: any. Not used if the server has keys."""
    request_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Seconds in which a client must send a request, headers and body together; a slower client gets 408. A file, such
    as new weights, may take longer if 16 KiB per second arrive. If a client reads nothing of its answer for this time,
    its connection is closed."""
    max_body_values: PositiveInt = 1024 * 1024
    """Maximum number of values in a request body: an item of a list counts one, a string four, a list, an object or a
    name in an object eight. A body with more gets 413, before it is parsed."""
    max_bodies_bytes: PositiveInt = 64 * 1024 * 1024
    """Bytes that all bodies above 64 KiB may take together while they arrive and are parsed. Without room, the server
    stops reading a body, and answers 503 after 10 s."""
    max_connections: PositiveInt = 4096
    """Maximum number of open connections, and so of HTTP requests. One more replaces an idle connection, or gets 503.
    Health probes have additional connections."""
