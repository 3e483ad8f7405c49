"""MooncakeStorage: an object per block."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence

from pegboard.plugins.kv_tiers.api import KVStorage, KVStorageContext, StorageError
from pegboard.plugins.storage_mooncake.client import Client, library
from pegboard.plugins.storage_mooncake.options import MooncakeOptions
from pegboard.toolkit.cache.block_frames import BlockFrames

logger = logging.getLogger(__name__)

MOST_KEYS = 1024
"""Of one call: the library fails with 4,096 and more."""
MOST_BYTES = 16 << 20
"""That go at once, but for one block that is larger; between two of these the deadline is looked at."""

NO_ROOM = -200
WRONG_SIZE = -600
OF_OBJECTS = range(-800, -699)
"""Codes about one object: it is not there, not complete yet, its lease has run out, its server is gone."""


class MooncakeStorage(KVStorage[MooncakeOptions]):
    """Blocks as objects `<prefix>:<identity>:<key in hexadecimal>`, each with the header of BlockFrames before it.

    They travel through memory that is registered with the store. An object that is there is not written again, which
    is the store's own rule; a damaged one is removed first. What is evicted, the store decides.
    """

    def __init__(self, options: MooncakeOptions, ctx: KVStorageContext) -> None:
        super().__init__(options, ctx)
        self._frames = BlockFrames(ctx.identity, ctx.block_bytes)
        self._prefix = f"{options.prefix}:{ctx.identity}:"
        count = max(1, min(MOST_KEYS, MOST_BYTES // self._frames.frame_bytes))
        self._client = Client(options, count, self._frames.frame_bytes)
        self._damaged = self._dropped = 0

    @classmethod
    def supports(cls, options: MooncakeOptions, ctx: KVStorageContext) -> str | None:
        try:
            library()
        except ModuleNotFoundError:
            raise
        except ImportError as error:
            needs = "`apt-get install libibverbs1 librdmacm1 libnuma1`"
            return f"Mooncake's library cannot be loaded ({error}); it needs the system's libraries for RDMA: {needs}"
        return None

    def exists(self, keys: Sequence[bytes], deadline: float) -> int:
        for start in range(0, len(keys), MOST_KEYS):
            if self._late(deadline):
                return start
            names = self._names(keys[start : start + MOST_KEYS])
            codes = self._client.store().batch_is_exist(names)
            self._check(codes, names)
            found = sum(1 for _ in itertools.takewhile(lambda code: code == 1, codes))
            if found < len(names):
                return start + found
        return len(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float) -> int:
        for start in range(0, len(keys), self._client.frames):
            if self._late(deadline):
                return start
            stop = min(len(keys), start + self._client.frames)
            found = self._read(keys[start:stop], into[start:stop])
            if start + found < stop:
                return start + found
        return len(keys)

    def set(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> int:
        for start in range(0, len(keys), self._client.frames):
            if self._late(deadline):
                return start
            stop = min(len(keys), start + self._client.frames)
            written = self._write(keys[start:stop], blocks[start:stop])
            if start + written < stop:
                return start + written
        return len(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), MOST_KEYS):
            self._remove(self._names(keys[start : start + MOST_KEYS]))

    def clear(self) -> None:
        code = self._client.store().remove_by_regex(f"^{self._prefix}", True)
        if code < 0:
            raise StorageError(f"Mooncake cannot remove what begins with {self._prefix}: {code}")

    def stats(self) -> Mapping[str, float]:
        return {"damaged": self._damaged, "dropped": self._dropped}

    def close(self) -> None:
        self._client.close()

    def _late(self, deadline: float) -> bool:
        return self.ctx.clock() >= deadline

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _check(self, codes: Sequence[int], names: Sequence[str]) -> None:
        """Raise StorageError where a code is not about an object, but about the store."""
        if len(codes) != len(names):
            raise StorageError(f"Mooncake answers {len(codes)} of {len(names)} keys")
        for code in codes:
            if code < 0 and code not in (NO_ROOM, WRONG_SIZE) and code not in OF_OBJECTS:
                raise StorageError(f"Mooncake's master at {self.options.master} answers with {code}")

    def _read(self, keys: Sequence[bytes], into: Sequence[memoryview]) -> int:
        names = self._names(keys)
        frames = _numbers(names)
        with self._client.lock:
            sizes = self._client.read([*frames])
            self._check(sizes, [*frames])
            for number, (key, out, name) in enumerate(zip(keys, into, names, strict=True)):
                size, frame = sizes[frames[name]], self._client.frame(frames[name])
                if size in OF_OBJECTS:
                    return number
                header, block = frame[: self._frames.header_bytes], frame[self._frames.header_bytes :]
                if size != self._frames.frame_bytes or not self._frames.fits(header, key, block):
                    self._damaged += 1
                    level = logging.WARNING if self._damaged == 1 else logging.DEBUG
                    logger.log(level, "a damaged block is removed: %s", name)
                    self._remove([name])
                    return number
                out.cast("B")[:] = block
        return len(keys)

    def _write(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> int:
        names = self._names(keys)
        frames = _numbers(names)
        with self._client.lock:
            for key, block, name in zip(keys, blocks, names, strict=True):
                frame = self._client.frame(frames[name])
                frame[: self._frames.header_bytes] = self._frames.header(key, block)
                frame[self._frames.header_bytes :] = block.cast("B")
            codes = self._client.write([*frames])
        self._check(codes, [*frames])
        written = sum(1 for _ in itertools.takewhile(lambda name: codes[frames[name]] == 0, names))
        self._dropped += written < len(names)
        return written

    def _remove(self, names: list[str]) -> None:
        self._check(self._client.store().batch_remove(names, True), names)


def _numbers(names: Sequence[str]) -> dict[str, int]:
    """Give each name one number: of a name that is twice in a call, the library fills one buffer only."""
    return {name: number for number, name in enumerate(dict.fromkeys(names))}
