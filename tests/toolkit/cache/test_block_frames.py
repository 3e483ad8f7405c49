"""Headers of blocks: format on disk, and what they notice."""

from __future__ import annotations

import struct
import zlib

import pytest

from pegboard.toolkit.cache.block_frames import BlockFrames

KEY, BLOCK, IDENTITY = b"k" * 33, b"block", "ab12"


def test_the_format_is_written_down() -> None:
    """Another format needs another version, or servers of two versions misread each other's blocks."""
    header = BlockFrames(IDENTITY, len(BLOCK)).header(KEY, BLOCK)
    checksum = zlib.crc32(b"".join((IDENTITY.encode(), KEY, BLOCK)))
    assert header == struct.pack("<8sHHIQ64s", b"pegbrdKV", 1, 33, checksum, 5, KEY)
    assert BlockFrames.header_bytes == len(header) == 88


def test_each_part_counts() -> None:
    frames = BlockFrames(IDENTITY, len(BLOCK))
    header = frames.header(KEY, BLOCK)
    assert frames.fits(memoryview(header), KEY, memoryview(BLOCK))
    assert not frames.fits(header, KEY, b"blocj")
    assert not frames.fits(header, KEY + b"\0", BLOCK)
    assert not BlockFrames("ab13", len(BLOCK)).fits(header, KEY, BLOCK)
    for at in range(len(header)):
        wrong = bytearray(header)
        wrong[at] ^= 1
        assert not frames.fits(wrong, KEY, BLOCK)


def test_a_key_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="at most 64 bytes, got 65"):
        BlockFrames(IDENTITY, 1).header(b"k" * 65, b"b")
