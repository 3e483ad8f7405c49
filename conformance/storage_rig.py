"""What the suite of KV storages talks to a storage with: keys, the bytes that each stands for, and guarded buffers."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from pegboard.core.interfaces.kv_storage import KVStorage

GUARD = 32
"""Bytes around each buffer that blocks are read into: they must stay as they are."""

FAR = float("inf")


def content(key: bytes, size: int, salt: int = 0) -> bytes:
    """Return the bytes that a key stands for: random, and others for each key."""
    return hashlib.shake_128(b"%d " % salt + key).digest(size)


def numbered(count: int, start: int = 0) -> list[bytes]:
    """Return keys as digests are: 32 random bytes."""
    return [hashlib.sha256(b"%d" % number).digest() for number in range(start, start + count)]


def repeated(count: int) -> list[bytes]:
    """Return so many keys, of which 300 differ: many blocks in a call, which cost little."""
    return list(itertools.islice(itertools.cycle(numbered(300)), count))


def odd_keys() -> list[bytes]:
    """Return keys of all lengths, of bytes that mean something to file systems, protocols and C; some begin others."""
    odd = [
        b"\0",
        b"\n",
        b"\r\n",
        b"/",
        b"../",
        b".",
        b" ",
        b"*",
        b"\\",
        b"%",
        b"\xff",
        b"\xc3\x28",
        b"a",
        b"A",
        b"~",
        b":",
    ]
    fill = bytes(range(256))
    keys = [(one * 64)[:length] for one in odd for length in (32, 33, 64)]
    return keys + [fill[start : start + length] for start in (0, 190) for length in range(32, 65)]


class Buffers:
    """Buffers to read blocks into, in one piece of memory with guards around each."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.step = size, size + GUARD
        self.memory = bytearray(b"\xa5") * (GUARD + count * self.step)
        view = memoryview(self.memory)
        self.views = [view[GUARD + n * self.step : GUARD + n * self.step + size] for n in range(count)]

    def check(self) -> None:
        """Compare the guards."""
        guard = b"\xa5" * GUARD
        starts = range(0, len(self.memory), self.step)
        assert all(self.memory[start : start + GUARD] == guard for start in starts), (
            "bytes around a buffer have changed"
        )


class Talk:
    """A storage, and what it says in the words of the tests."""

    def __init__(self, storage: KVStorage, salt: int = 0) -> None:
        self.storage = storage
        self.size = storage.ctx.block_bytes
        self.salt = salt

    def put(self, keys: Sequence[bytes], deadline: float = FAR) -> int:
        """Write each key's own bytes."""
        return self.storage.set(keys, [memoryview(content(key, self.size, self.salt)) for key in keys], deadline)

    def has(self, keys: Sequence[bytes], deadline: float = FAR) -> int:
        return self.storage.exists(keys, deadline)

    def read(self, keys: Sequence[bytes], deadline: float = FAR) -> int:
        """Read blocks, and compare those that count."""
        buffers = Buffers(len(keys), self.size)
        count = self.storage.get(keys, buffers.views, deadline)
        assert 0 <= count <= len(keys)
        for key, view in itertools.islice(zip(keys, buffers.views, strict=True), count):
            assert view == content(key, self.size, self.salt), f"other bytes than those written under {key.hex()}"
        buffers.check()
        return count

    def holds(self, keys: Sequence[bytes]) -> None:
        """Fail unless all are there."""
        assert (self.has(keys), self.read(keys)) == (len(keys), len(keys))

    def lacks(self, keys: Sequence[bytes]) -> None:
        """Fail where one is there."""
        assert [self.read([key]) for key in keys] == [0] * len(keys)
