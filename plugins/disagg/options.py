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
    """Seconds that a request may wait here: on prefill for others to be taken, on decode for its KV; then it ends with
    status 504. null: for ever."""

    hold_timeout: float | None = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Seconds after which the server frees KV that this gate still keeps for a decode server. `hold` ends it before."""

    role: Literal["prefill", "decode"] = "prefill"
    """`prefill` computes prompts and keeps their KV until it is read; `decode` reads it and writes the answers."""

    listen: str = "127.0.0.1:8998"
    """Where decode servers find a prefill server, `host:port`: the router's bootstrap port. Port 0 takes a free one.
    Of role `prefill` only.
    """

    peers: tuple[str, ...] = LOOPBACK
    """Prefill servers that a decode server connects to, as `host` or `host:port`. The address comes from a request's
    body, so that it must not be just any."""

    default_port: int = Field(default=8998, ge=1, le=65535)
    """Port of a prefill server where a request names none."""

    secret_file: Path | None = None
    """A file with at least 16 bytes that both sides have: they show each other that they know it. Required unless
    `listen` and `peers` are loopback."""

    hold: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds that prefill keeps a prompt's KV for, after the answer or after decode has asked for it, whichever is
    later."""

    grace: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    """Seconds in which a decode server whose connection broke may come back before its KV is freed."""

    max_held_share: float = Field(default=0.5, gt=0, le=1)
    """Share of prefill's KV pool that prompts may take which are computed for decode servers or wait to be read. Others
    wait at the gate, API keys in turns."""

    allow_plain: bool = True
    """Whether requests without a room are served as on any other server; false refuses them with status 400."""

    on_loss: Literal["fail", "compute"] = "fail"
    """What a decode server does where KV will not come. `fail`: status 502, and the router tries again. `compute`: it
    computes the prompt itself."""

    connect_timeout: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Seconds for a connection and its handshake."""

    ping: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Seconds between two pings. A peer that is silent for three of them is lost."""

    max_rooms: int = Field(default=4096, ge=1)
    """Requests that decode servers may ask for before they have come to prefill, of which each may have as many as it
    leaves to others; and requests that may wait on a decode server. Where they are taken, the API key
    that has most gives way to others."""

    max_connections: int = Field(default=64, ge=1)
    """Connections that a server takes or opens."""

    max_bytes_in_flight: int = Field(default=256 * 2**20, ge=2**20)
    """Bytes that a decode server reads at once, in all."""

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
