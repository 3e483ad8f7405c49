"""The handshake: both sides show that they know the secret, and that KV means the same to them. No I/O here.

decode              prefill
hello       ->               who connects, and a nonce
            <-  challenge    who answers, a nonce, and a signature over both messages
proof       ->               decode's facts, and its signature over everything so far
            <-  welcome      prefill's facts, and how its memory is read: told to those who have signed only

A signature is HMAC-SHA-256 with the secret, empty where there is none. A message that was recorded before is of no use:
both nonces are in it.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from pegboard.plugins.disagg.messages import (
    VERSION,
    Challenge,
    Facts,
    Hello,
    Message,
    Opening,
    Proof,
    Refuse,
    Welcome,
    encode,
)

NONCE = 32
INSTANCE = 16
MAX_DIFFERING = 8
"""Fields that a refusal names; more are counted."""
MAX_SHOWN = 80
"""Characters of a value in a refusal."""
MAX_REASON = 2000
REMEDIES = {
    "format": "the version of Pegboard",
    "weights": "model.path",
    "config": "model.path",
    "layers": "model.path",
    "heads": "model.path",
    "dtype": "model.dtype",
    "head_bytes": "memory.kv_dtype",
    "kept as": "memory.kv_dtype",
    "numerics 0": "runner.use",
    "numerics 1": "speculation.use",
    "engine": "kv_transfer.use",
}
"""What is to be set alike on both servers, by what differs."""


class Refused(Exception):
    """The handshake has failed. `answer` is what the other side is told, None where it need not hear of it."""

    def __init__(self, reason: str, answer: Refuse | None = None) -> None:
        super().__init__(reason)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Self:
    """What a server says of itself. `instance` names this run of it."""

    role: str
    instance: bytes
    facts: Facts
    description: bytes
    secret: bytes = b""


@dataclass(frozen=True, slots=True)
class Peer:
    """What the other one has said, once the handshake is through. Of a decode server there is no description."""

    role: str
    instance: bytes
    facts: Facts
    description: bytes = b""


def differing(here: Facts, there: Facts) -> dict[str, tuple[str, str]]:
    """Return the fields that do not agree, with both values."""
    found = {
        name: (_shown(mine), _shown(theirs))
        for name in ("engine", "heads", "head_bytes", "size", "dp_size")
        if (mine := getattr(here, name)) != (theirs := getattr(there, name))
    }
    for name in sorted({*here.described, *there.described}):
        mine, theirs = here.described.get(name, "-"), there.described.get(name, "-")
        if mine != theirs:
            found[name] = (mine, theirs)
    if here.identity != there.identity and not found:
        found["identity"] = (here.identity.hex()[:16], there.identity.hex()[:16])
    return found


def refusal(differences: Mapping[str, tuple[str, str]], role: str) -> Refuse:
    """Say which fields differ, and what is to be set alike. `role` is that of the side whose values come first. The
    text is read on both sides.
    """
    named = list(differences)[:MAX_DIFFERING]
    more = len(differences) - len(named)
    other = "prefill" if role == "decode" else "decode"
    parts = []
    for name in named:
        mine, theirs = ((value or "-")[:MAX_SHOWN] for value in differences[name])
        values = sorted([f"{mine} on {role}", f"{theirs} on {other}"], key=lambda text: text.endswith("decode"))
        parts.append(f"{name[:MAX_SHOWN]}: {', '.join(values)}")
    parts += [f"and {more} more"] if more else []
    alike = ", ".join(dict.fromkeys(remedy for name, remedy in REMEDIES.items() if name in differences))
    ending = f". Set alike on both servers: {alike}" if alike else ""
    return Refuse(f"KV differs ({'; '.join(parts)}){ending}", tuple(named))


def _shown(value: str | int | tuple[int, ...]) -> str:
    """Return a value for people; of numbers by region, how many in a row are equal."""
    if not isinstance(value, tuple):
        return str(value)
    runs = [(number, len(list(run))) for number, run in itertools.groupby(value)]
    return ", ".join(f"{number} in {count} region{'s'[: count > 1]}" for number, count in runs)


class Connecting:
    """The side that connects: decode."""

    def __init__(self, own: Self) -> None:
        self._own = own
        self._hello = Hello(VERSION, own.role, own.instance, secrets.token_bytes(NONCE))
        self._challenge: Challenge | None = None
        self.trusted = False
        """Whether the other side has shown that it knows the secret."""

    def begin(self) -> Opening | None:
        """Return what is to be sent first."""
        return self._hello

    def take(self, message: Message) -> tuple[Opening | None, Peer | None]:
        """Return what is to be sent next, and the peer where the handshake is through. Raises Refused."""
        if isinstance(message, Refuse):
            raise Refused(message.reason[:MAX_REASON] or "it gives no reason")
        if isinstance(message, Challenge) and self._challenge is None:
            return self._prove(message), None
        if isinstance(message, Welcome) and self._challenge is not None:
            differences = differing(self._own.facts, message.facts)
            if differences:
                raise Refused(refusal(differences, self._own.role).reason)
            said = self._challenge
            return None, Peer(said.role, said.instance, message.facts, message.description)
        raise Refused(f"an unexpected {type(message).__name__} in the handshake")

    def _prove(self, challenge: Challenge) -> Proof:
        _check_opening(self._own, challenge.version, challenge.role, challenge.instance, challenge.nonce)
        unsigned = msgspec.structs.replace(challenge, mac=b"")
        _check_mac(challenge.mac, _mac(self._own.secret, b"challenge", self._hello, unsigned))
        self.trusted, self._challenge = True, challenge
        proof = Proof(self._own.facts, b"")
        return Proof(self._own.facts, _mac(self._own.secret, b"proof", self._hello, challenge, proof))


class Answering:
    """The side that listens: prefill."""

    def __init__(self, own: Self) -> None:
        self._own = own
        self._said: tuple[Hello, Challenge] | None = None
        self.trusted = False

    def begin(self) -> Opening | None:
        return None

    def take(self, message: Message) -> tuple[Opening | None, Peer | None]:
        """As of Connecting."""
        if isinstance(message, Hello) and self._said is None:
            return self._challenge(message), None
        if isinstance(message, Proof) and self._said is not None and not self.trusted:
            return self._welcome(message, *self._said)
        raise Refused(f"an unexpected {type(message).__name__} in the handshake")

    def _challenge(self, hello: Hello) -> Challenge:
        own = self._own
        _check_opening(own, hello.version, hello.role, hello.instance, hello.nonce)
        unsigned = Challenge(VERSION, own.role, own.instance, secrets.token_bytes(NONCE), b"")
        challenge = msgspec.structs.replace(unsigned, mac=_mac(own.secret, b"challenge", hello, unsigned))
        self._said = (hello, challenge)
        return challenge

    def _welcome(self, proof: Proof, hello: Hello, challenge: Challenge) -> tuple[Opening, Peer]:
        own = self._own
        unsigned = Proof(proof.facts, b"")
        _check_mac(proof.mac, _mac(own.secret, b"proof", hello, challenge, unsigned))
        self.trusted = True
        differences = differing(own.facts, proof.facts)
        if differences:
            refuse = refusal(differences, own.role)
            raise Refused(refuse.reason, refuse)
        return Welcome(own.facts, own.description), Peer(hello.role, hello.instance, proof.facts)


def _check_opening(own: Self, version: int, role: str, instance: bytes, nonce: bytes) -> None:
    if version != VERSION:
        raise _refused(f"the protocol's version is {VERSION} on {own.role}, {version} on the other side", "version")
    if role not in ("prefill", "decode") or role == own.role:
        raise _refused(f"both sides say that they are {own.role!r}" if role == own.role else "not a role", "role")
    if len(nonce) != NONCE or len(instance) != INSTANCE or instance == own.instance:
        raise _refused("nonce or instance are not what they should be", "instance")


def _check_mac(given: bytes, right: bytes) -> None:
    if not hmac.compare_digest(given, right):
        raise _refused(
            "the signature differs: `secret_file` must hold the same on both sides, or be set on none", "mac"
        )


def _mac(secret: bytes, purpose: bytes, *messages: Opening) -> bytes:
    if not secret:
        return b""
    signer = hmac.new(secret, purpose, hashlib.sha256)
    for message in messages:
        data = encode(message)
        signer.update(len(data).to_bytes(4, "big") + data)
    return signer.digest()


def _refused(reason: str, field: str) -> Refused:
    return Refused(reason, Refuse(reason, (field,)))
