"""Options of the gate that parts prefill from decode."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from pegboard.core.interfaces.admission_gate import GateOptions

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MIN_SECRET = 16


class DisaggOptions(GateOptions):
    """Options of `disagg`."""

    timeout: float | None = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds that a request may wait here: on prefill until others are taken, on decode for its KV. Then it ends with
    status 504. null: no limit."""

    hold_timeout: float | None = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Seconds after which the server frees KV that this gate still keeps for a decode server. Normally `hold` ends
    earlier."""

    role: Literal["prefill", "decode"] = "prefill"
    """`prefill` computes prompts and keeps their KV until it is read; `decode` reads it and writes the answers."""

    listen: str = "127.0.0.1:8998"
    """Address on which a prefill server listens for decode servers, `host:port`; the port is the router's bootstrap
    port. Port 0: a free port. Only for role `prefill`."""

    peers: tuple[str, ...] = LOOPBACK
    """Prefill servers to which a decode server may connect, as `host` or `host:port`. The address comes from a
    request's body, so it must be restricted."""

    default_port: int = Field(default=8998, ge=1, le=65535)
    """Port of a prefill server, if a request names none."""

    secret_file: Path | None = None
    """File with a shared secret of at least 16 bytes, the same on both sides. Required unless `listen` and `peers` are
    loopback."""

    hold: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds for which prefill keeps a prompt's KV, after the answer or after decode has asked for it, whichever is
    later."""

    grace: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    """Seconds after which KV is freed if the connection of its decode server broke."""

    max_held_share: float = Field(default=0.5, gt=0, le=1)
    """Share of prefill's KV pool for prompts that are computed for decode servers or wait to be read. Other requests
    wait at the gate, API keys in turns."""

    allow_plain: bool = True
    """Serve requests without a room as any other server does. false: refuse them with status 400."""

    on_loss: Literal["fail", "compute"] = "fail"
    """What a decode server does if KV will not come. `fail`: status 502, so that the router tries again. `compute`:
    compute the prompt itself."""

    connect_timeout: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Time limit for connecting, including the handshake, in seconds."""

    ping: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Seconds between two pings. A peer that is silent for three times as long counts as lost."""

    max_rooms: int = Field(default=4096, ge=1)
    """Maximum number of requests that decode servers may ask for before they have reached prefill, and of requests that
    may wait on a decode server. Each decode server may use as many as it leaves free. If all are taken, the API key
    with the most gives way to others."""

    max_connections: int = Field(default=64, ge=1)
    """Maximum number of connections that a server accepts or opens."""

    max_bytes_in_flight: int = Field(default=256 * 2**20, ge=2**20)
    """Maximum number of bytes that a decode server reads at once."""

    @field_validator("listen")
    @classmethod
    def _an_address(cls, value: str) -> str:
        host, port = split_address(value)
        if not host or port is None:
            raise ValueError(f"listen must be `host:port`, got {value!r}")
        return value

    @field_validator("peers")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if not split_address(one)[0]:
                raise ValueError(f"peers are `host` or `host:port`, got {one!r}")
        return value

    @model_validator(mode="after")
    def _of_its_role(self) -> Self:
        if self.role == "decode" and "listen" in self.model_fields_set:
            raise ValueError("`listen` is for `role: prefill`; decode servers do not listen, they connect to `peers`")
        return self

    @model_validator(mode="after")
    def _signed_off_loopback(self) -> Self:
        hosts = (
            [split_address(self.listen)[0]] if self.role == "prefill" else [split_address(one)[0] for one in self.peers]
        )
        away = [host for host in hosts if not is_loopback(host)]
        if away and self.secret_file is None:
            raise ValueError(
                f"{away[0]!r} is not this machine: set `secret_file`, the same on both sides, "
                "so that no other program can read or write KV"
            )
        return self

    def provides(self, declared: frozenset[str]) -> frozenset[str]:
        """Prefill holds requests, and decode brings their KV."""
        return declared & ({"holds"} if self.role == "prefill" else {"brings_kv"})

    def secret(self) -> bytes:
        """Return what both sides know, b"" where nothing is needed. Raises ValueError for a file that is too short,
        that others may read, or that this server cannot read.
        """
        if self.secret_file is None:
            return b""
        try:
            mode, secret = self.secret_file.stat().st_mode, self.secret_file.read_bytes().strip()
        except FileNotFoundError as error:
            make = f"head -c 32 /dev/urandom | base64 > {self.secret_file}; chmod 600 {self.secret_file}"
            raise ValueError(
                f"secret_file {self.secret_file} does not exist. Make it, and copy it to the other servers: {make}"
            ) from error
        except OSError as error:
            raise ValueError(f"secret_file {self.secret_file} cannot be read: {error.strerror or error}") from error
        if mode & 0o077:
            raise ValueError(f"secret_file {self.secret_file} may be read by others: chmod 600 {self.secret_file}")
        if len(secret) < MIN_SECRET:
            raise ValueError(
                f"secret_file {self.secret_file} has {len(secret)} bytes, at least {MIN_SECRET} are needed"
            )
        return secret

    def may_connect(self, host: str, port: int) -> bool:
        """Return whether `peers` has this address."""
        return any(
            host.lower() == allowed.lower() and at in (None, port) for allowed, at in map(split_address, self.peers)
        )


def split_address(text: str) -> tuple[str, int | None]:
    """Return host ("" for what is not an address) and port, None where it names none or any ("*")."""
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
        if not closed or (rest and not rest.startswith(":")):
            return "", None
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    else:
        host, port = text, ""
    if port in ("", "*"):
        return host, None
    return (host, int(port)) if port.isascii() and port.isdigit() and int(port) < 65536 else ("", None)


def is_loopback(host: str) -> bool:
    """Return whether a host, as it is written, is this machine."""
    return host.lower() == "localhost" or host == "::1" or (host.startswith("127.") and host.replace(".", "").isdigit())
