"""Descriptions of sources: structs with a digest, since they come over the network and go into libraries in C."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from pegboard.plugins.kv_handoff.api.transfer import MAX_DESCRIPTION, TransferError

StructT = TypeVar("StructT", bound=msgspec.Struct)

_DIGEST = 16


def pack(kind: bytes, content: msgspec.Struct) -> bytes:
    """Return a description of this kind. Raises ValueError where it is longer than a description may be."""
    data = msgspec.msgpack.encode(content)
    packed = kind + _digest(kind, data) + data
    if len(packed) > MAX_DESCRIPTION:
        raise ValueError(f"the description has {len(packed)} bytes; there are too many regions")
    return packed


def unpack(kind: bytes, description: bytes, content: type[StructT]) -> StructT:
    """Return what a description of this kind says. Raises TransferError for anything else."""
    begin = len(kind) + _DIGEST
    data = description[begin:]
    if len(description) > MAX_DESCRIPTION or description[:begin] != kind + _digest(kind, data):
        raise TransferError(f"{bytes(description[:40])!r} is not a description of the kind {kind!r}")
    try:
        return msgspec.msgpack.decode(data, type=content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TransferError(f"a description of the kind {kind!r} is wrong: {error}") from error


def _digest(kind: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST, person=kind[:16]).digest()
