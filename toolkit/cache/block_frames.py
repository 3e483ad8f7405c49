"""Headers of KV blocks in storages, which show whether a block is the one that was written."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_KEY_BYTES = 64

MAGIC = b"pegbrdKV"
VERSION = 1

_FIXED = struct.Struct("<8sHHIQ")
"""Magic, version, bytes of the key, checksum, bytes of the block. The key follows, filled up with zeros."""


class BlockFrames:
    """Headers of the blocks of one identity. A header names format, key and length, and has a CRC-32 over identity,
    key and block; so a block that is damaged, cut off, or stands under another key or identity does not fit it.
    """

    header_bytes = _FIXED.size + MAX_KEY_BYTES

    def __init__(self, identity: str, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.frame_bytes = self.header_bytes + block_bytes
        self._seed = zlib.crc32(identity.encode())

    def header(self, key: bytes, block: Buffer) -> bytes:
        """Return the header of a block of `block_bytes`. Raises ValueError for a key that is too long."""
        if len(key) > MAX_KEY_BYTES:
            raise ValueError(f"a key has at most {MAX_KEY_BYTES} bytes, got {len(key)}")
        checksum = zlib.crc32(block, zlib.crc32(key, self._seed))
        return _FIXED.pack(MAGIC, VERSION, len(key), checksum, self.block_bytes) + key.ljust(MAX_KEY_BYTES, b"\0")

    def fits(self, header: Buffer, key: bytes, block: Buffer) -> bool:
        """Return whether a header is the one of this key and block: each of its bits counts."""
        return bytes(header) == self.header(key, block)
