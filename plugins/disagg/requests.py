"""What a request says to this gate, and what is read of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.admission_gate import Verdict
from pegboard.core.interfaces.status import FinishType
from pegboard.plugins.disagg.events import Address
from pegboard.plugins.disagg.messages import MAX_ROW, Meta, RoomKey

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req

NAME = "disagg"
HOST, PORT, ROOM, INDEX = "bootstrap_host", "bootstrap_port", "bootstrap_room", "index"
MAX_HOST = 255
MAX_ROOM = 2**63 - 1
MAX_INDEX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Asked:
    """The router's three fields, and the number of the answer."""

    key: RoomKey
    host: str | None
    port: int | None

    def address(self, default_port: int) -> Address | None:
        """Return where its prefill server listens, None where it does not say."""
        return None if self.host is None else Address(self.host, self.port or default_port)


class Malformed(Exception):
    """A field is not what it should be: its name, and why."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field} {reason}")
        self.field = field

    def verdict(self) -> Verdict:
        return Verdict.failed(str(self), code="invalid_bootstrap", param=self.field)


def has_room(req: Req) -> bool:
    """Return whether a request names a room. What cannot be understood counts as one: it is refused then."""
    said = req.params.get(NAME)
    if said is None:
        return False
    return not isinstance(said, Mapping) or any(said.get(name) is not None for name in (HOST, PORT, ROOM))


def asked_by(req: Req) -> Asked:
    """Return what a request that has a room says. Raises Malformed."""
    said = req.params.get(NAME)
    if not isinstance(said, Mapping):
        raise Malformed(f"params.{NAME}", f"must be an object with {HOST}, {PORT} and {ROOM}")
    room = _whole(said, ROOM, 0, MAX_ROOM)
    if room is None:
        raise Malformed(ROOM, f"is missing: {HOST} and {PORT} go with it")
    host = said.get(HOST)
    if host is not None and not (isinstance(host, str) and 0 < len(host) <= MAX_HOST and host.isprintable()):
        raise Malformed(HOST, f"must be a name of 1 to {MAX_HOST} characters")
    key = RoomKey(room, _whole(said, INDEX, 0, MAX_INDEX) or 0)
    return Asked(key, host, _whole(said, PORT, 1, 65535))


def _whole(said: Mapping[str, object], name: str, least: int, most: int) -> int | None:
    value = said.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise Malformed(name, f"must be a whole number from {least} to {most}")
    return value


def prompt_digest(req: Req) -> bytes:
    """Return 32 bytes that are equal where prompts are, and what parts their KV: one side may tokenise differently."""
    digest = hashlib.sha256(req.namespace.encode("utf-8", "surrogatepass") + b"\0")
    digest.update(req.tokens.key_view(req.input_len).astype("<i8").tobytes())
    return digest.digest()


def meta_of(req: Req, rows: Mapping[str, bytes]) -> Meta | None:
    """Return what goes along with the KV of a request that has ended; None where it has failed. `rows` is
    what stages send with its first token.
    """
    reason, output, logprobs = req.output.finish_reason, req.output, req.logprobs
    if req.output_len < 1 or reason is None or reason.type is FinishType.ABORT:
        return None
    values = logprobs is not None and bool(logprobs.values)
    return Meta(
        token=int(req.output_ids[0]),
        digest=prompt_digest(req),
        cached_tokens=output.cached_tokens,
        logprob=logprobs.values[0] if logprobs is not None and values else None,
        tops=tuple(logprobs.tops[0]) if logprobs is not None and logprobs.tops else (),
        chosen=tuple(logprobs.chosen[0]) if logprobs is not None and logprobs.chosen else (),
        rows={name: row for name, row in rows.items() if len(row) <= MAX_ROW},
    )
