"""The conformance suite of KVStorage."""

from __future__ import annotations

import itertools
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pegboard.conformance.suite import capability
from pegboard.plugins.kv_tiers.suite.storage_conduct import StorageConductTests
from pegboard.plugins.kv_tiers.suite.storage_damage import DamageTests
from pegboard.plugins.kv_tiers.suite.storage_restarts import RestartTests
from pegboard.plugins.kv_tiers.suite.storage_rig import FAR, Stores, Talk, content, numbered, odd_keys, repeated, saying

MANY = 5000
BATCH = 1024
"""Blocks that a storage may work on between two looks at the clock, at most."""


class KVStorageContract(StorageConductTests, DamageTests, RestartTests):
    """What the mover of tiers counts on. Each test has identities of its own and removes their blocks at its end, so a
    place that others use may serve; `place` gives each test one of its own where that costs little.
    """

    contract = "kv_storage"

    # What is written is read.

    @pytest.mark.parametrize("size", [1, 64, 4097, 1 << 20, 16 << 20])
    def test_round_trip(self, stores: Stores, size: int) -> None:
        talk, keys = stores.open(size), numbered(2 if size > 1 << 20 else 5)
        assert (talk.has(keys), talk.read(keys)) == (0, 0), "blocks are there that were never written"
        talk.written(keys)
        talk.holds(keys)
        talk.holds(keys[::-1])

    def test_any_keys(self, stores: Stores) -> None:
        talk, keys = stores.open(), odd_keys()
        assert len(set(keys)) == len(keys)
        talk.written(keys)
        talk.holds(keys)
        talk.storage.delete(keys[::2])
        talk.lacks(keys[::2], "were deleted")
        lost = [key.hex() for key in keys[1::2] if not talk.read([key])]
        assert not lost, (
            f"blocks vanish when others are deleted: keys that begin alike, or end in zeros, are one: {lost}"
        )

    def test_any_memory(self, stores: Stores) -> None:
        """Blocks come from memory that cannot be written to, and from arrays; they are read into arrays, too."""
        talk = stores.open(64)
        (key, other) = numbered(2)
        array = np.frombuffer(content(other, 64), np.float32).reshape(4, 4)
        out = np.zeros((4, 4), np.float32)
        with saying(_ANY_MEMORY):
            assert talk.storage.set([key, other], [memoryview(content(key, 64)), array.data], FAR) == 2
            talk.holds([key, other])
            assert talk.storage.get([other], [out.data], FAR) == 1
            assert out.tobytes() == content(other, 64)

    def test_nothing_is_asked(self, stores: Stores) -> None:
        talk = stores.open()
        assert (talk.put([]), talk.has([]), talk.read([])) == (0, 0, 0), "no keys: set, exists and get count 0"
        talk.storage.delete([])

    def test_hits_count_from_the_first_on(self, stores: Stores) -> None:
        talk, keys = stores.open(), numbered(9)
        assert talk.put([key for n, key in enumerate(keys) if n not in (4, 6)]) == 7
        for start, count in ((0, 4), (3, 1), (4, 0), (5, 1), (6, 0), (7, 2)):
            some = keys[start:]
            for call, counted in (("exists", talk.has(some)), ("get", talk.read(some))):
                assert counted <= count, f"{call} counts {counted}, not {count}: it counts a block behind a gap"
                assert counted == count, f"{call} counts {counted}, where {count} blocks come before the first gap"

    def test_writing_again_is_harmless(self, stores: Stores) -> None:
        talk, keys = stores.open(), numbered(6)
        talk.written(keys[:3])
        for again, count in ((keys[:3], 3), ([*keys, keys[0]], 7)):
            found = talk.put(again)
            assert found == count, f"set counts {found} of {count} keys: blocks that are there already count, too"
        talk.holds(keys)

    def test_many_keys_in_a_call(self, stores: Stores) -> None:
        talk, keys, gap = stores.open(16), repeated(MANY), 4321
        talk.written(keys)
        [keys[gap]] = numbered(1, start=900)
        assert (talk.has(keys), talk.read(keys)) == (gap, gap), (
            f"exists and get count others than the {gap} before a gap"
        )
        talk.written(keys)
        talk.holds(keys)
        talk.storage.delete(keys)
        talk.lacks(keys[::500])

    # Removing.

    def test_deleted_blocks_are_gone(self, stores: Stores) -> None:
        talk, keys = stores.open(), numbered(6)
        talk.put(keys)
        with saying("delete() of blocks that are not there, or are named twice, does nothing"):
            talk.storage.delete([*numbered(2, 50), keys[3], keys[5], keys[3]])
            talk.storage.delete([keys[3]])
        talk.lacks([keys[3], keys[5]], "were deleted")
        assert (talk.has(keys), talk.read(keys)) == (3, 3), "exists and get do not end at a block that was deleted"
        talk.holds(keys[4:5], "after others were deleted")
        talk.written(keys)
        talk.holds(keys)

    def test_clear_removes_everything(self, stores: Stores) -> None:
        talk, keys = stores.open(), numbered(20)
        talk.put(keys)
        talk.storage.clear()
        talk.lacks(keys, "were cleared")
        talk.storage.clear()
        talk.written(keys)
        talk.holds(keys)

    # Identities.

    def test_another_identity_finds_nothing(self, stores: Stores) -> None:
        """Nor does it clear, delete or overwrite what is not its own. Identities may begin alike."""
        one, keys = stores.open(), numbered(5)
        one.put(keys)
        for identity in (stores.identity[:-1] + ("0" if stores.identity[-1] != "0" else "1"), secrets.token_hex(32)):
            other = stores.open(identity=identity, salt=1)
            assert (other.has(keys), other.read(keys)) == (0, 0), "blocks of another identity are found"
            other.written(keys[:3])
            other.holds(keys[:3], "beside those of another identity")
            other.lacks(keys[3:], "are another identity's")
            other.storage.delete(keys[:1])
            other.storage.clear()
            other.lacks(keys)
            one.holds(keys, "after those of another identity were written, deleted and cleared in the same place")

    def test_identities_differ_in_their_blocks(self, stores: Stores) -> None:
        """Blocks of several sizes live in one place."""
        keys = numbered(4)
        sizes = [stores.open(size, identity=secrets.token_hex(32)) for size in (16, 48, 5000)]
        for talk in sizes:
            talk.written(keys)
        for talk in sizes:
            talk.holds(keys)

    # Deadlines.

    def test_no_call_outlives_its_deadline(self, stores: Stores) -> None:
        """A deadline in the past leaves time for some blocks at most; it is not an error. The clock stands still."""
        talk, keys = stores.open(256, clock=lambda: 1000.0), repeated(3 * BATCH)
        assert talk.put(keys, 999.0) <= BATCH, "it writes blocks long after its deadline"
        talk.written(keys)
        assert talk.has(keys, 999.0) <= BATCH, "it looks for blocks long after its deadline"
        assert talk.read(keys, 999.0) <= BATCH, "it reads blocks long after its deadline"
        found = talk.has(keys, 1001.0), talk.read(keys, 1001.0)
        assert found == (len(keys), len(keys)), (
            f"exists and get count {found} of {len(keys)} where the clock stands still before the deadline: it is of "
            "ctx.clock, and no other"
        )

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
        talk.written(keys)
        talk.holds(keys, "after eight threads wrote and deleted them")

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
        talk.holds([key], "after it was written and deleted many times")

    # Capabilities.

    @capability("shared")
    def test_several_share_a_place(self, stores: Stores) -> None:
        one, two = stores.open(), stores.open()
        keys = numbered(10)
        one.written(keys[:5])
        two.holds(keys[:5], "by another instance at this place")
        two.written(keys)
        one.holds(keys, "by another instance at this place")
        two.storage.delete(keys[2:3])
        one.lacks(keys[2:3], "were deleted by another instance at this place")
        one.storage.clear()
        two.lacks(keys, "were cleared by another instance at this place")
        stores.close(one)
        two.written(keys)
        two.holds(keys, "after another instance at this place was closed")

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
        talks[0].written(keys)
        for talk in talks:
            talk.holds(keys, "after several instances wrote and deleted them")

    # For operators.

    def test_figures_are_plain(self, stores: Stores) -> None:
        talk = stores.open()
        talk.put(numbered(3))
        talk.read(numbered(4))
        for name, value in talk.storage.stats().items():
            assert isinstance(name, str), f"stats() has a name that is not a text: {name!r}"
            assert isinstance(value, int | float), f"stats() has {name}={value!r}, which is not a number"


_ANY_MEMORY = (
    'blocks and buffers are memory of any shape and type, which may be read-only: take `memoryview(block).cast("B")` '
    "for its bytes, and `nbytes` for how many they are, since len() counts rows"
)
