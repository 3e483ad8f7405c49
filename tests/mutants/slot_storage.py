"""A storage with equal slots and an index of them, for mutants about calls at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.kv_tiers.api import KVStorage, KVStorageContext
from pegboard.toolkit.cache.block_frames import BlockFrames


class SlotStorage(KVStorage[NoOptions]):
    """Blocks in slots of one buffer, which are used again once they are free."""

    def __init__(self, options: NoOptions, ctx: KVStorageContext) -> None:
        super().__init__(options, ctx)
        self.frames = BlockFrames(ctx.identity, ctx.block_bytes)
        self.lock = threading.Lock()
        self.slots: list[bytes] = []
        self.free: list[int] = []
        self.index: dict[bytes, int] = {}

    def exists(self, keys: Sequence[bytes], deadline: float) -> int:
        for count, key in enumerate(keys):
            with self.lock:
                if self.ctx.clock() >= deadline or key not in self.index:
                    return count
        return len(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float) -> int:
        for count, (key, out) in enumerate(zip(keys, into, strict=True)):
            if self.ctx.clock() >= deadline or not self.read(key, out):
                return count
        return len(keys)

    def set(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> int:
        for count, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if self.ctx.clock() >= deadline:
                return count
            self.write(key, bytes(block))
        return len(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            with self.lock:
                self.forget(key)

    def clear(self) -> None:
        with self.lock:
            self.slots, self.free, self.index = [], [], {}

    def read(self, key: bytes, out: memoryview) -> bool:
        with self.lock:
            slot = self.index.get(key)
            if slot is None:
                return False
            return self.take(key, self.slots[slot], out)

    def write(self, key: bytes, block: bytes) -> None:
        with self.lock:
            if key in self.index:
                return
            slot = self.free_slot()
            self.slots[slot] = self.frames.header(key, block) + block
            self.index[key] = slot

    def free_slot(self) -> int:
        if self.free:
            return self.free.pop()
        self.slots.append(b"")
        return len(self.slots) - 1

    def forget(self, key: bytes) -> None:
        slot = self.index.pop(key, None)
        if slot is not None:
            self.free.append(slot)

    def take(self, key: bytes, framed: bytes, out: memoryview) -> bool:
        """Copy what lies in a slot, where it is the key's; forget the key where it is not."""
        size = self.frames.header_bytes
        if not self.frames.fits(framed[:size], key, framed[size:]):
            self.forget(key)
            return False
        out.cast("B")[:] = framed[size:]
        return True
