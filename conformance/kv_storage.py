"""The conformance suite of KVStorage."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard.conformance.storage_rig import FAR, Talk, content, numbered, odd_keys, repeated
from pegboard.conformance.suite import ContractSuite, capability
from pegboard.core.interfaces.clock import Clock
from pegboard.core.interfaces.kv_storage import KVStorage, KVStorageContext

BLOCK = 96
MANY = 5000
BATCH = 1024
"""Blocks that a storage may work on between two looks at the clock, at most."""


class Stores:
    """Opens storages at the place of one test."""

    def __init__(self, suite: KVStorageContract, options: Mapping[str, object]) -> None:
        self._suite, self._options = suite, options
        self._opened: dict[int, KVStorage] = {}
        self.identity = secrets.token_hex(32)

    def open(
        self, block_bytes: int = BLOCK, *, identity: str = "", clock: Clock = time.monotonic, salt: int = 0
    ) -> Talk:
        """Return a new instance, by default of the test's identity."""
        ctx = KVStorageContext(identity or self.identity, block_bytes, clock)
        storage: KVStorage = self._suite.build(ctx, **self._options)
        self._opened[id(storage)] = storage
        return Talk(storage, salt)

    def close(self, talk: Talk) -> None:
        self._opened.pop(id(talk.storage)).close()

    def crash(self, talk: Talk) -> None:
        """Use it no more, as if its process had died; memory and threads go at the end of the test."""

    def end(self) -> None:
        """Leave nothing behind."""
        for storage in self._opened.values():
            storage.clear()
        for storage in self._opened.values():
            storage.close()


class KVStorageContract(ContractSuite):
    """What the mover of tiers counts on. Each test has identities of its own and removes their blocks at its end, so a
    place that others use may serve; `place` gives each test one of its own where that costs little.
    """

    contract = "kv_storage"

    def place(self, folder: Path) -> Mapping[str, Any]:
        """Return options that name a place which is empty: one for each test. `folder` is the test's own."""
        return {}

    def raw(self, storage: KVStorage, key: bytes) -> bytes | None:
        """Return what stands for a block in the storage's place, header and all; None where there is nothing."""
        pytest.skip("the class has no raw() and put_raw()")

    def put_raw(self, storage: KVStorage, key: bytes, data: bytes | None) -> None:
        """Let these bytes stand for a block, behind the storage's back; None: let it vanish."""
        pytest.skip("the class has no raw() and put_raw()")

    @pytest.fixture
    def stores(self, tmp_path: Path) -> Iterator[Stores]:
        """Open storages at this test's place, and leave nothing behind."""
        stores = Stores(self, self.place(tmp_path))
        yield stores
        stores.end()

    # What is written is read.

    @pytest.mark.parametrize("size", [1, 64, 4097, 1 << 20, 16 << 20])
    def test_round_trip(self, stores: Stores, size: int) -> None:
        talk, keys = stores.open(size), numbered(2 if size > 1 << 20 else 5)
        assert (talk.has(keys), talk.read(keys)) == (0, 0)
        assert talk.put(keys) == len(keys)
        talk.holds(keys)
        talk.holds(keys[::-1])

    def test_any_keys(self, stores: Stores) -> None:
        talk, keys = stores.open(), odd_keys()
        assert len(set(keys)) == len(keys)
        assert talk.put(keys) == len(keys)
        talk.holds(keys)
        talk.storage.delete(keys[::2])
        assert [talk.read([key]) for key in keys] == [0, 1] * (len(keys) // 2)

    def test_any_memory(self, stores: Stores) -> None:
        """Blocks come from memory that cannot be written to, and from arrays; they are read into arrays, too."""
        talk = stores.open(64)
        (key, other) = numbered(2)
        array = np.frombuffer(content(other, 64), np.float32).reshape(4, 4)
        assert talk.storage.set([key, other], [memoryview(content(key, 64)), array.data], FAR) == 2
        talk.holds([key, other])
        out = np.zeros((4, 4), np.float32)
        assert talk.storage.get([other], [out.data], FAR) == 1
        assert out.tobytes() == content(other, 64)

    def test_nothing_is_asked(self, stores: Stores) -> None:
        talk = stores.open()
        assert (talk.put([]), talk.has([]), talk.read([])) == (0, 0, 0)
        talk.storage.delete([])

    def test_hits_count_from_the_first_on(self, stores: Stores) -> None:
        talk, keys = stores.open(), numbered(9)
        assert talk.put([key for n, key in enumerate(keys) if n not in (4, 6)]) == 7
        for start, count in ((0, 4), (3, 1), (4, 0), (5, 1), (6, 0), (7, 2)):
            assert (talk.has(keys[start:]), talk.read(keys[start:])) == (count, count), "a block behind a gap counts"

    def test_writing_again_is_harmless(self, stores: Stores) -> None:
        talk, keys = stores.open(), numbered(6)
        assert talk.put(keys[:3]) == 3
        assert talk.put(keys[:3]) == 3
        assert talk.put([*keys, keys[0]]) == 7
        talk.holds(keys)

    def test_many_keys_in_a_call(self, stores: Stores) -> None:
        talk, keys, gap = stores.open(16), repeated(MANY), 4321
        assert talk.put(keys) == MANY
        [keys[gap]] = numbered(1, start=900)
        assert (talk.has(keys), talk.read(keys)) == (gap, gap)
        assert talk.put(keys) == MANY
        talk.holds(keys)
        talk.storage.delete(keys)
        talk.lacks(keys[::500])

    # Removing.

    def test_deleted_blocks_are_gone(self, stores: Stores) -> None:
        talk, keys = stores.open(), numbered(6)
        talk.put(keys)
        talk.storage.delete([*numbered(2, 50), keys[3], keys[5], keys[3]])
        talk.storage.delete([keys[3]])
        assert (talk.has(keys), talk.read(keys)) == (3, 3)
        assert (talk.has(keys[4:]), talk.read(keys[4:])) == (1, 1)
        assert talk.put(keys) == 6
        talk.holds(keys)

    def test_clear_removes_everything(self, stores: Stores) -> None:
        talk, keys = stores.open(), numbered(20)
        talk.put(keys)
        talk.storage.clear()
        talk.lacks(keys)
        talk.storage.clear()
        assert talk.put(keys) == 20
        talk.holds(keys)

    # Identities.

    def test_another_identity_finds_nothing(self, stores: Stores) -> None:
        """Nor does it clear, delete or overwrite what is not its own. Identities may begin alike."""
        one, keys = stores.open(), numbered(5)
        one.put(keys)
        for identity in (stores.identity[:-1] + ("0" if stores.identity[-1] != "0" else "1"), secrets.token_hex(32)):
            other = stores.open(identity=identity, salt=1)
            assert (other.has(keys), other.read(keys)) == (0, 0), "blocks of another identity are found"
            assert other.put(keys[:3]) == 3
            assert (other.has(keys), other.read(keys)) == (3, 3)
            other.storage.delete(keys[:1])
            other.storage.clear()
            other.lacks(keys)
            one.holds(keys)

    def test_identities_differ_in_their_blocks(self, stores: Stores) -> None:
        """Blocks of several sizes live in one place."""
        keys = numbered(4)
        sizes = [stores.open(size, identity=secrets.token_hex(32)) for size in (16, 48, 5000)]
        for talk in sizes:
            assert talk.put(keys) == 4
        for talk in sizes:
            talk.holds(keys)

    # Deadlines.

    def test_no_call_outlives_its_deadline(self, stores: Stores) -> None:
        """A deadline in the past leaves time for some blocks at most; it is not an error. The clock stands still."""
        talk, keys = stores.open(256, clock=lambda: 1000.0), repeated(3 * BATCH)
        assert talk.put(keys, 999.0) <= BATCH, "it writes blocks long after its deadline"
        assert talk.put(keys, FAR) == len(keys)
        assert talk.has(keys, 999.0) <= BATCH, "it looks for blocks long after its deadline"
        assert talk.read(keys, 999.0) <= BATCH, "it reads blocks long after its deadline"
        assert (talk.has(keys, 1001.0), talk.read(keys, 1001.0)) == (len(keys), len(keys))

    def test_a_deadline_amid_a_call(self, stores: Stores) -> None:
        """Each look at the clock takes a second; it is looked at often enough, and what was done until then counts."""
        ticks = itertools.count(1000)
        talk, keys = stores.open(16, clock=lambda: float(next(ticks))), repeated(3 * BATCH)
        written = talk.put(keys, next(ticks) + 3.0)
        assert written < len(keys), "it does not look at the clock while it writes"
        assert talk.read(keys[:written]) == written
        talk.put(keys)
        for call, what in ((talk.has, "looks"), (talk.read, "reads")):
            assert call(keys, next(ticks) + 3.0) < len(keys), f"it does not look at the clock while it {what}"

    # Threads.

    def test_threads_may_do_anything_at_once(self, stores: Stores) -> None:
        """Whatever is read is what belongs to its key, and at the end everything is as the last calls left it."""
        talk, keys, rounds = stores.open(2000), numbered(24), 12

        def work(number: int) -> None:
            draw = np.random.default_rng(number)
            for _ in range(rounds):
                some = [keys[n] for n in draw.permutation(len(keys))[:8]]
                assert talk.put(some) <= 8
                assert talk.has(some) <= 8
                talk.read(some)
                talk.storage.delete(some[:2])

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(work, number) for number in range(8)]:
                done.result()
        assert talk.put(keys) == len(keys)
        talk.holds(keys)

    def test_a_block_appears_all_at_once(self, stores: Stores) -> None:
        """Readers never see a part of a block that is being written."""
        talk, key = stores.open(1 << 20), numbered(1)[0]
        done = threading.Event()

        def write() -> None:
            for _ in range(25):
                talk.put([key])
                talk.storage.delete([key])
            talk.put([key])
            done.set()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            while not done.is_set():
                talk.read([key])
            writing.result()
        assert talk.read([key]) == 1

    # Capabilities.

    @capability("shared")
    def test_several_share_a_place(self, stores: Stores) -> None:
        one, two = stores.open(), stores.open()
        keys = numbered(10)
        assert one.put(keys[:5]) == 5
        two.holds(keys[:5])
        assert two.put(keys) == 10
        one.holds(keys)
        two.storage.delete(keys[2:3])
        assert (one.has(keys), one.read(keys)) == (2, 2)
        one.storage.clear()
        two.lacks(keys)
        stores.close(one)
        assert two.put(keys) == 10
        two.holds(keys)

    @capability("shared")
    def test_several_write_the_same_at_once(self, stores: Stores) -> None:
        talks, keys = [stores.open(30_000) for _ in range(3)], numbered(10)

        def work(talk: Talk) -> None:
            for _ in range(6):
                talk.put(keys)
                talk.read(keys)
                talk.storage.delete(keys[5:])

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(work, talks))
        assert talks[0].put(keys) == 10
        for talk in talks:
            talk.holds(keys)

    @capability("persistent")
    @pytest.mark.parametrize("how", ["closed", "crashed"])
    def test_blocks_outlive_what_wrote_them(self, stores: Stores, how: str) -> None:
        one, keys = stores.open(), numbered(10)
        assert one.put(keys) == 10
        if how == "closed":
            stores.close(one)
        else:
            stores.crash(one)
        two = stores.open()
        two.holds(keys)
        assert two.put(numbered(3, 50)) == 3
        two.holds(numbered(3, 50))

    # Damage, where the class says how.

    def check_miss(self, talk: Talk, keys: Sequence[bytes], damaged: int, data: bytes | None, what: str) -> None:
        """Put bytes in the place of one block: it and what follows do not count; it is removed, and can be written."""
        self.put_raw(talk.storage, keys[damaged], data)
        assert talk.read(keys) == damaged, f"a block that is {what} is read"
        assert self.raw(talk.storage, keys[damaged]) is None, f"a block that is {what} is not removed"
        assert talk.has(keys) == damaged
        assert talk.put(keys) == len(keys)
        talk.holds(keys)

    def test_damaged_blocks_are_misses(self, stores: Stores) -> None:
        talk, keys = stores.open(), numbered(4)
        talk.put(keys)
        whole = self.raw(talk.storage, keys[2])
        assert whole is not None
        for data, what in (
            (None, "gone"),
            (b"", "empty"),
            (whole[: len(whole) // 2], "cut off"),
            (whole[:-1], "cut off by a byte"),
            (whole[:-BLOCK], "a header alone"),
            (whole + b"\0", "too long"),
            (bytes(len(whole)), "zeros"),
            (whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2), "torn"),
            (b"\x80\x04." + whole[3:], "something else"),
        ):
            self.check_miss(talk, keys, 2, data, what)

    def test_no_bit_may_flip(self, stores: Stores) -> None:
        talk, keys = stores.open(24), numbered(1)
        talk.put(keys)
        whole = self.raw(talk.storage, keys[0])
        assert whole is not None
        assert len(whole) >= 24
        for at in range(len(whole)):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << (at % 8)
            self.check_miss(talk, keys, 0, bytes(flipped), f"changed in byte {at} of {len(whole)}")

    def test_blocks_cannot_be_exchanged(self, stores: Stores) -> None:
        """Neither with those of another key, nor with those of another identity, which have the same key."""
        one, other = stores.open(), stores.open(identity=secrets.token_hex(32), salt=1)
        keys = numbered(3)
        one.put(keys)
        other.put(keys)
        foreign = (
            (one, keys[0], "another key's"),
            (one, keys[2], "another key's"),
            (other, keys[1], "another model's"),
        )
        for talk, key, what in foreign:
            self.check_miss(one, keys, 1, self.raw(talk.storage, key), what)

    # For operators.

    def test_figures_are_plain(self, stores: Stores) -> None:
        talk = stores.open()
        talk.put(numbered(3))
        talk.read(numbered(4))
        for name, value in talk.storage.stats().items():
            assert isinstance(name, str)
            assert isinstance(value, int | float)
