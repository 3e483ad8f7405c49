"""A store as Mooncake's, in this process's memory: its codes were read off the real one, version 0.3.13."""

from __future__ import annotations

import ctypes
import re
import threading

MISSING, WRONG_SIZE, NO_ROOM, FAILED = -704, -600, -200, -900


class FakeMooncakeStore:
    """What the storage uses of MooncakeDistributedStore. Objects are common to all instances."""

    objects: dict[str, bytes] = {}
    lock = threading.Lock()
    room = 1 << 40
    failing = False
    calls: list[int] = []

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def setup(self, *_: object) -> int:
        return FAILED if self.failing else 0

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self.registered[buffer_ptr] = size
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        del self.registered[buffer_ptr]
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.objects) for key in self.taken(keys)]

    def batch_get_into(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        """Of a key that is there twice only the last buffer is filled, as the real one does."""
        last = {key: number for number, key in enumerate(self.taken(keys))}
        with self.lock:
            codes = {key: self.read(key, buffer_ptrs[number], sizes[number]) for key, number in last.items()}
        return [codes[key] for key in keys]

    def batch_put_from(self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]) -> list[int]:
        with self.lock:
            return [self.write(*one) for one in zip(self.taken(keys), buffer_ptrs, sizes, strict=True)]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        assert force, "what was just read has a lease"
        return [MISSING if self.objects.pop(key, None) is None else 0 for key in self.taken(keys)]

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int:
        assert force
        found = [key for key in list(self.objects) if re.search(regex_pattern, key)]
        return sum(self.objects.pop(key, None) is not None for key in found)

    def close(self) -> int:
        assert not self.registered
        return 0

    def taken(self, keys: list[str]) -> list[str]:
        """Look at the keys of a call."""
        assert len(keys) <= 1024, "the real one fails with some thousands"
        assert all(isinstance(key, str) for key in keys)
        self.calls.append(len(keys))
        if self.failing:
            raise RuntimeError("the master is away")
        return keys

    def read(self, key: str, pointer: int, size: int) -> int:
        self.look(pointer, size)
        found = self.objects.get(key)
        if found is None:
            return MISSING
        if len(found) > size:
            return WRONG_SIZE
        ctypes.memmove(pointer, found, len(found))
        return len(found)

    def write(self, key: str, pointer: int, size: int) -> int:
        self.look(pointer, size)
        if key in self.objects:
            return 0
        if sum(map(len, self.objects.values())) + size > self.room:
            return NO_ROOM
        self.objects[key] = ctypes.string_at(pointer, size)
        return 0

    def look(self, pointer: int, size: int) -> None:
        inside = [start <= pointer and pointer + size <= start + length for start, length in self.registered.items()]
        assert any(inside), "this memory is not registered"
