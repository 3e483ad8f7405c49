"""What the two sides say to each other: msgspec structs as MessagePack, told apart by a field `type`.

One connection per decode server and prefill server, opened by decode. First come hello, challenge, proof and welcome
(handshake.py), then messages about rooms. A *room* is one request on both servers: its number, which the router draws,
and the `index` of the answer where a body asks for several. The decode server numbers its requests (`attempt`), so
that an answer to an earlier request of the same room is told apart; the prefill server numbers the times that it has
begun to compute (`epoch`), since what it announced before a retraction is void.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec

VERSION = 2
MAX_OPENING = 64 * 2**10
"""Bytes of a frame from a peer that has not shown who it is."""
MAX_FRAME = 4 * 2**20
"""Bytes of any frame."""
MAX_ROW = 2**20
"""Bytes of what one stage sends with a token: a longer row stays with the prefill server."""
MAX_RUNS = 2**18
"""Runs of slots in one `ready`; more are told in several. 8 bytes each."""


class RoomKey(NamedTuple):
    """What both sides call a request."""

    room: int
    answer: int = 0

    def __str__(self) -> str:
        return f"{self.room}/{self.answer}" if self.answer else str(self.room)


def dp_rank(room: int, dp_size: int) -> int:
    """Return which data-parallel rank of a prefill server computes a room. Nothing else decides it."""
    return room % dp_size


class Facts(msgspec.Struct, frozen=True):
    """What must agree for KV to be read: `identity` is equal where KV of equal tokens is, on all ranks of a server, and
    `described` says for people what it depends on. `engine` reads. By region of the pool: `heads` of all `size` ranks
    together, and the bytes of each in a slot. `rank` speaks for them. Sizes and ranks may differ, the rest not.
    """

    identity: bytes
    described: dict[str, str]
    engine: str
    heads: tuple[int, ...]
    head_bytes: tuple[int, ...]
    rank: int = 0
    size: int = 1
    dp_size: int = 1


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The connecting side's first message. `instance` names this run of the server, `nonce` is drawn anew."""

    version: int
    role: str
    instance: bytes
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The other side's answer, with a signature over both."""

    version: int
    role: str
    instance: bytes
    nonce: bytes
    mac: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The connecting side's facts, signed together with what was said before."""

    facts: Facts
    mac: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The end of the handshake: how the memory of each rank of this server is read, those of the first data-parallel
    rank first.
    """

    facts: Facts
    descriptions: tuple[bytes, ...]


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """The other end of it. `reason` is for people; `fields` name what differs."""

    reason: str
    fields: tuple[str, ...] = ()


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Sent at intervals: the other side answers with the same number."""

    number: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer to a ping."""

    number: int


class Meta(msgspec.Struct, frozen=True):
    """What goes with the end of a prompt: the token sampled behind it, what the request wants to know of it, and the
    digest of the prompt that was computed. `rows`: see `Arrived`.
    """

    token: int
    digest: bytes
    cached_tokens: int = 0
    logprob: float | None = None
    tops: tuple[tuple[float, int], ...] = ()
    chosen: tuple[tuple[float, int], ...] = ()
    rows: dict[str, bytes] = {}


class Want(msgspec.Struct, frozen=True, tag="want"):
    """From decode: it has this room's request, of `length` tokens. Said again, it asks for everything anew."""

    room: int
    index: int
    attempt: int
    length: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From prefill: KV of the tokens [start, upto) can be read under `lease`, as long as this epoch lasts. `runs` are
    pairs of int32, the first slot and the number of slots, in the tokens' order. `meta` comes with the last one.
    """

    room: int
    index: int
    attempt: int
    epoch: int
    lease: int
    start: int
    upto: int
    runs: bytes
    meta: Meta | None = None


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """From decode: it has read up to here. `last`: it has everything, so that prefill may let go."""

    room: int
    index: int
    attempt: int
    epoch: int
    upto: int
    last: bool = False


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """From prefill: what was taken was valid throughout."""

    room: int
    index: int
    attempt: int
    epoch: int
    upto: int


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """From prefill: this epoch has ended. What was not confirmed of it is void."""

    room: int
    index: int
    attempt: int
    epoch: int


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """From decode: the room is not wanted any more."""

    room: int
    index: int
    attempt: int
    reason: str = ""


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """From prefill: the room's KV will not come."""

    room: int
    index: int
    attempt: int
    status: int
    code: str
    message: str


FromDecode: TypeAlias = Want | Taken | Drop
FromPrefill: TypeAlias = Ready | Kept | Gone | Fail
AboutRooms: TypeAlias = FromDecode | FromPrefill
Opening: TypeAlias = Hello | Challenge | Proof | Welcome | Refuse
Message: TypeAlias = Opening | Ping | Pong | AboutRooms

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class NotAMessage(Exception):
    """Bytes that are not a message."""


def encode(message: Message) -> bytes:
    """Return a message as MessagePack, without its length."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Return the message in these bytes. Raises NotAMessage."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise NotAMessage(str(error)) from error


def key_of(message: AboutRooms) -> RoomKey:
    """Return the room that a message is about."""
    return RoomKey(message.room, message.index)
