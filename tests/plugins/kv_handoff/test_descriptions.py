"""Descriptions that come over the network."""

from __future__ import annotations

import msgspec
import pytest

from pegboard.plugins.kv_handoff.api.descriptions import pack, unpack
from pegboard.plugins.kv_handoff.api.transfer import MAX_DESCRIPTION, TransferError


class Content(msgspec.Struct, frozen=True):
    port: int
    name: str = ""


class Other(msgspec.Struct, frozen=True):
    port: str


KIND = b"test 1\n"


def test_there_and_back() -> None:
    assert unpack(KIND, pack(KIND, Content(5, "ä")), Content) == Content(5, "ä")


def test_any_other_byte_is_noticed() -> None:
    right = pack(KIND, Content(5, "name"))
    for at in range(len(right)):
        wrong = bytearray(right)
        wrong[at] ^= 1
        with pytest.raises(TransferError):
            unpack(KIND, bytes(wrong), Content)
    for other in (b"", right[:-1], right + b"\0", right[1:], KIND):
        with pytest.raises(TransferError):
            unpack(KIND, other, Content)


def test_other_contents_are_noticed() -> None:
    with pytest.raises(TransferError):
        unpack(b"test 2\n", pack(KIND, Content(5)), Content)
    with pytest.raises(TransferError):
        unpack(KIND, pack(KIND, Other("text")), Content)


def test_what_is_too_long_is_not_sent() -> None:
    with pytest.raises(ValueError, match="too many regions"):
        pack(KIND, Content(1, "x" * MAX_DESCRIPTION))
