"""Digests of a sequence's blocks: each covers its block, all blocks before it, and the seed of the chain."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pegboard.core.interfaces.keys import PrefixKey

DIGEST_SIZE = 32
FORMAT = b"pegboard-kv-1"
"""Changes with the form of the keys, or of the blocks that they stand for."""


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def framed(*fields: bytes) -> bytes:
    """Return fields one after the other, each with its length before it, so that others never give the same bytes."""
    return b"".join(struct.pack("<I", len(field)) + field for field in fields)


def chain(before: bytes, blocks: NDArray[np.int64], digest: Callable[[bytes], bytes] = sha256) -> list[bytes]:
    """Return the digests of `blocks` int64 [n, block], each taken over its predecessor's digest and its own tokens, as
    64 bits little endian; `before` is what goes before the first one.
    """
    rows = np.ascontiguousarray(blocks, dtype="<i8")
    digests = []
    for row in rows.view(f"V{rows.shape[1] * rows.itemsize}").reshape(-1).tolist():  # as bytes, all at once
        before = digest(before + row)
        digests.append(before)
    return digests


class ChainDigests:
    """The digests of a sequence's first blocks as far as they are known, end to end: what a request's memo keeps."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def __len__(self) -> int:
        return len(self._data) // DIGEST_SIZE

    def __getitem__(self, block: int) -> bytes:
        return bytes(self._data[block * DIGEST_SIZE : (block + 1) * DIGEST_SIZE])

    def between(self, start: int, end: int) -> list[bytes]:
        """Return those of the blocks [start, end) that are known."""
        data = bytes(self._data[start * DIGEST_SIZE : end * DIGEST_SIZE])
        return [data[at : at + DIGEST_SIZE] for at in range(0, len(data), DIGEST_SIZE)]

    def note(self, start: int, digests: bytes) -> None:
        """Note these digests of the blocks from `start` on. What would leave a gap, or is known, is left out."""
        if start * DIGEST_SIZE <= len(self._data):
            self._data += digests[len(self._data) - start * DIGEST_SIZE :]


class BlockKeys:
    """The keys under which storages keep a sequence's blocks: a chain that begins with the format, the identity of what
    computed the KV, and the namespace. Identity and namespace are framed by their lengths, so that no namespace with
    tokens behind it reads like another one.

    Keys are worked out once for each sequence with a memo, block after block as it grows.
    """

    def __init__(self, identity: bytes, block: int) -> None:
        """Make keys of blocks of `block` tokens."""
        if block < 1:
            raise ValueError(f"a block has at least one token, got {block}")
        self.block = block
        self._identity = identity

    def of(self, key: PrefixKey, stop: int, start: int = 0) -> list[bytes]:
        """Return the keys of the blocks [start, stop), 32 bytes each. Raises ValueError where the sequence has not as
        many whole blocks.
        """
        if not 0 <= start <= stop <= len(key) // self.block:
            raise ValueError(f"blocks {start} to {stop} of {len(key)} tokens, in blocks of {self.block}")
        known = self._known(key)
        have = len(known)
        if have < stop:
            before = known[have - 1] if have else self._seed(key.namespace)
            rest = key.tokens[have * self.block : stop * self.block].reshape(-1, self.block)
            known.note(have, b"".join(chain(before, rest)))
        return known.between(start, stop)

    def _known(self, key: PrefixKey) -> ChainDigests:
        """By namespace too, so that not even a memo in wrong hands carries a key from one to another."""
        if key.memo is None:
            return ChainDigests()
        return key.memo.of(("block_keys", self.block, self._identity, key.namespace), ChainDigests)

    def _seed(self, namespace: str) -> bytes:
        """Return what goes before a sequence's first block."""
        return sha256(FORMAT + framed(self._identity, namespace.encode("utf-8", "surrogatepass")))
