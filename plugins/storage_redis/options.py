"""Options of the storage behind Redis' protocol."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

from pegboard.core.interfaces.options import Options

SCHEMES = ("redis", "rediss", "unix")


class RedisOptions(Options):
    """Options of `redis`."""

    url: str = "redis://127.0.0.1:6379/0"
    """The server's URL: `redis://host:port/database`, `rediss://…` with TLS, or `unix:///path/to/socket`. User and
    password have their own options."""

    username: str = ""
    """The user's name, if the server has users."""

    password: str = ""
    """The password, if the server requires one."""

    prefix: str = Field(default="pegboard", pattern=r"^[A-Za-z0-9_.:-]+$")
    """Prefix of the server's keys: `prefix:identity:key`."""

    ttl: int = Field(default=7 * 86_400, ge=0)
    """Seconds after which a block expires if it is not written again. 0: never."""

    timeout: float = Field(default=1.0, gt=0)
    """Seconds that the server may be silent. A whole call may take 5, so set less."""

    tls_ca_file: str = ""
    """CA certificates for the server's certificate. Empty: those that the system trusts."""

    tls_cert_file: str = ""
    """Client certificate, if the server requires one."""

    tls_key_file: str = ""
    """Private key of the client certificate."""

    @field_validator("url")
    @classmethod
    def _is_plain(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise ValueError(f"begins with {', '.join(f'{one}://' for one in SCHEMES)}")
        if parts.username or parts.password:
            raise ValueError("has no user and password: they are the options username and password")
        if parts.query or parts.fragment:
            raise ValueError("has nothing behind ? or #: what can be set are the other options")
        if parts.scheme == "unix" and not parts.path:
            raise ValueError("names a socket: unix:///path/to/socket")
        if parts.scheme != "unix" and parts.path.strip("/") and not parts.path.strip("/").isdecimal():
            raise ValueError("ends with the number of a database, or with none")
        return url
