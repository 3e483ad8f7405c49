"""What the suite of KV storages works with: keys and the bytes that each stands for, guarded buffers, and what a class
says of its storage.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from pegboard.conformance.rig.dying import work_and_die
from pegboard.conformance.rig.interrupting import ended
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.clock import Clock
from pegboard.plugins.kv_tiers.api import KVStorage, KVStorageContext

BLOCK = 96
"""Bytes of a block, where a test says nothing else."""

GUARD = 32
"""Bytes around each buffer that blocks are read into: they must stay as they are."""

UNTOUCHED = b"\xa5"
"""What each byte of a buffer is before anything is read into it."""

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
    [digest] = numbered(1, start=7000)
    keys += [digest[:31] + b"\0", digest[:31] + b"\0\0", digest[:30] + b"\0\0"]
    return keys + [fill[start : start + length] for start in (0, 190) for length in range(32, 65)]


@contextlib.contextmanager
def saying(words: str) -> Iterator[None]:
    """Say these words of what fails."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{words}: {type(error).__name__}: {error}") from error


class Buffers:
    """Buffers to read blocks into, in one piece of memory with guards around each."""

    def __init__(self, count: int, size: int) -> None:
        self.size, self.step = size, size + GUARD
        self.memory = bytearray(UNTOUCHED) * (GUARD + count * self.step)
        view = memoryview(self.memory)
        self.views = [view[GUARD + n * self.step : GUARD + n * self.step + size] for n in range(count)]

    def check(self) -> None:
        """Compare the guards."""
        guard = UNTOUCHED * GUARD
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

    def written(self, keys: Sequence[bytes]) -> None:
        """Write each key's own bytes. Fail unless all are taken."""
        __tracebackhide__ = True
        count = self.put(keys)
        assert count == len(keys), f"set has written {count} of {len(keys)} blocks"

    def has(self, keys: Sequence[bytes], deadline: float = FAR) -> int:
        return self.storage.exists(keys, deadline)

    def read(self, keys: Sequence[bytes], deadline: float = FAR) -> int:
        """Read blocks, and compare those that count."""
        buffers = Buffers(len(keys), self.size)
        count = self.storage.get(keys, buffers.views, deadline)
        assert 0 <= count <= len(keys), f"get counts {count} of {len(keys)} blocks"
        for place, (key, view) in enumerate(itertools.islice(zip(keys, buffers.views, strict=True), count)):
            if view == content(key, self.size, self.salt):
                continue
            assert view != UNTOUCHED * self.size, (
                f"get counts {count} blocks, but nothing was written into buffer {place}: what is returned counts from "
                "the first key on, and ends where a block is missing"
            )
            raise AssertionError(f"get reads other bytes than those written under {key.hex()} (key {place})")
        buffers.check()
        return count

    def holds(self, keys: Sequence[bytes], when: str = "") -> None:
        """Fail unless all are there."""
        __tracebackhide__ = True
        has, read = self.has(keys), self.read(keys)
        all_of = len(keys)
        assert (has, read) == (all_of, all_of), (
            f"of {all_of} blocks that were written exists counts {has}, and get reads {read}{when and f', {when}'}"
        )

    def lacks(self, keys: Sequence[bytes], why: str = "were removed") -> None:
        """Fail where one is there."""
        __tracebackhide__ = True
        found = [place for place, key in enumerate(keys) if self.read([key]) or self.has([key])]
        assert not found, f"of {len(keys)} blocks that {why} these are there: {found[:9]}"


class Stores:
    """Opens storages at the place of one test."""

    def __init__(self, suite: StorageRig, options: Mapping[str, object]) -> None:
        self._suite, self.options = suite, options
        self._opened: dict[int, KVStorage] = {}
        self.identity = secrets.token_hex(32)

    def open(
        self, block_bytes: int = BLOCK, *, identity: str = "", clock: Clock = time.monotonic, salt: int = 0
    ) -> Talk:
        """Return a new instance, by default of the test's identity."""
        ctx = KVStorageContext(identity or self.identity, block_bytes, clock)
        storage: KVStorage = self._suite.build(ctx, **self.options)
        self._opened[id(storage)] = storage
        return Talk(storage, salt)

    def close(self, talk: Talk) -> None:
        self._opened.pop(id(talk.storage)).close()

    def after(self, how: str, work: Callable[[Talk], object]) -> Talk:
        """Return a new instance, after one at this place has done `work` and was then closed, or has crashed."""
        if how == "closed":
            talk = self.open()
            work(talk)
            self.close(talk)
        else:
            self._suite.skip_if_it_objects(KVStorageContext(self.identity, BLOCK), **self.options)
            self._suite.in_child(lambda: work(self.open()))
        return self.open()

    def end(self) -> None:
        """Leave nothing behind."""
        for storage in self._opened.values():
            ended(storage.clear)
        for storage in self._opened.values():
            storage.close()


class StorageRig(ContractSuite):
    """What a class says of its storage."""

    def place(self, folder: Path) -> Mapping[str, object]:
        """Return options that name a place which is empty: one for each test. `folder` is the test's own."""
        return {}

    def raw(self, storage: KVStorage, key: bytes) -> bytes | None:
        """Return what stands for a block in the storage's place, header and all; None where there is nothing."""
        pytest.skip("the class has no raw() and put_raw()")

    def put_raw(self, storage: KVStorage, key: bytes, data: bytes | None) -> None:
        """Let these bytes stand for a block, behind the storage's back; None: let it vanish."""
        pytest.skip("the class has no raw() and put_raw()")

    impossible: ClassVar[Mapping[str, str]] = {}
    """Kinds of damage (`DAMAGE` lists them) that cannot happen to a block, with reasons: ``{"too_long": "slots are of
    one size"}``.
    """

    def in_child(self, work: Callable[[], object]) -> None:
        """Run `work` in a process of its own, which is killed when it returns. Override this, as ``work()``, where the
        place is this process's memory, as that of a fake is.
        """
        work_and_die(work)

    @pytest.fixture
    def stores(self, tmp_path: Path) -> Iterator[Stores]:
        """Open storages at this test's place, and leave nothing behind."""
        stores = Stores(self, self.place(tmp_path))
        yield stores
        stores.end()
