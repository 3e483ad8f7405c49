"""A storage of KV blocks in memory, which fails on demand."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from pegboard.core.interfaces.options import Options
from pegboard.plugins.kv_tiers.api import KVStorage, KVStorageContext, StorageError
from pegboard.toolkit.cache.block_frames import BlockFrames

CALLS = ("exists", "get", "set", "delete", "clear")


class FakeStorageOptions(Options):
    """Options of FakeStorage."""

    place: str = ""
    """Storages of one place and one identity hold the same blocks."""


class Faults:
    """What a storage does wrong, from the next call on. It may be changed by any thread while calls are under way."""

    def __init__(self) -> None:
        self.delay = 0.0
        """Seconds that each call takes."""
        self.error: BaseException | None = None
        """What each call raises."""
        self.only: Collection[str] = CALLS
        """The calls that `delay`, `error` and `hang` are about."""
        self.calls: Counter[str] = Counter()
        """How many calls of each name have begun."""
        self.hanging = 0
        """Calls that hang just now."""
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._released.set()

    def fail(self, error: Exception | str = "broken on demand") -> None:
        """Let each call raise this, StorageError by default, until `mend`."""
        self.error = StorageError(error) if isinstance(error, str) else error

    def hang(self) -> None:
        """Let each call hang, whatever its deadline, until `release`."""
        self._released.clear()

    def release(self) -> None:
        """Let calls that hang go on, and others hang no longer."""
        self._released.set()

    def mend(self) -> None:
        """Be well again, and let go what hangs."""
        self.delay, self.error, self.only = 0.0, None, CALLS
        self.release()

    def meet(self, call: str) -> None:
        """Do to a call what is wrong; at its beginning."""
        with self._lock:
            self.calls[call] += 1
        if call not in self.only:
            return
        if not self._released.is_set():
            with self._lock:
                self.hanging += 1
            self._released.wait()
            with self._lock:
                self.hanging -= 1
        if self.delay:
            time.sleep(self.delay)
        if self.error is not None:
            raise self.error


class Place:
    """The blocks of one place and identity, each with its header, by key. Hold `lock` to look at them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.blocks: dict[bytes, bytes] = {}

    def lose(self, keys: Collection[bytes] | None = None) -> None:
        """Forget these blocks, or all of them."""
        with self.lock:
            for key in list(self.blocks if keys is None else keys):
                self.blocks.pop(key, None)


_places: dict[tuple[str, str], Place] = {}
_places_lock = threading.Lock()
_numbers = itertools.count()


class FakeStorage(KVStorage[FakeStorageOptions]):
    """Keeps blocks in this process's memory, where other instances of one place and identity find them. `faults` says
    what goes wrong; `place.lose()` loses blocks. It keeps the contract as long as nothing is to go wrong.
    """

    def __init__(self, options: FakeStorageOptions, ctx: KVStorageContext) -> None:
        super().__init__(options, ctx)
        self.faults = Faults()
        self.frames = BlockFrames(ctx.identity, ctx.block_bytes)
        self.closed = False
        with _places_lock:
            self.place = _places.setdefault((options.place, ctx.identity), Place())

    @classmethod
    def make(cls, block_bytes: int, identity: str = "00", place: str = "") -> FakeStorage:
        """Return one at a place of its own, or at this one."""
        return cls(
            FakeStorageOptions(place=place or f"place {next(_numbers)}"), KVStorageContext(identity, block_bytes)
        )

    def exists(self, keys: Sequence[bytes], deadline: float) -> int:
        self.faults.meet("exists")
        with self.place.lock:
            for count, key in enumerate(keys):
                if self._late(deadline) or key not in self.place.blocks:
                    return count
        return len(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float) -> int:
        self.faults.meet("get")
        for count, (key, out) in enumerate(zip(keys, into, strict=True)):
            if self._late(deadline) or not self._read(key, out):
                return count
        return len(keys)

    def set(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> int:
        self.faults.meet("set")
        for count, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if self._late(deadline):
                return count
            self._write(key, block)
        return len(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        self.faults.meet("delete")
        self.place.lose(keys)

    def clear(self) -> None:
        self.faults.meet("clear")
        self.place.lose()

    def stats(self) -> Mapping[str, float]:
        with self.place.lock:
            return {"blocks": len(self.place.blocks)}

    def close(self) -> None:
        self.closed = True

    def _late(self, deadline: float) -> bool:
        return self.ctx.clock() >= deadline

    def _read(self, key: bytes, out: memoryview) -> bool:
        with self.place.lock:
            framed = self.place.blocks.get(key)
            if framed is None:
                return False
            header, block = framed[: self.frames.header_bytes], framed[self.frames.header_bytes :]
            if len(block) == self.ctx.block_bytes and self.frames.fits(header, key, block):
                out.cast("B")[:] = block
                return True
            del self.place.blocks[key]
            return False

    def _write(self, key: bytes, block: memoryview) -> None:
        framed = self.frames.header(key, block) + bytes(block)
        with self.place.lock:
            self.place.blocks[key] = framed
