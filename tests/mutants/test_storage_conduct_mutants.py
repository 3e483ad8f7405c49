"""Storages that break what outlives a call: their place, their process, or another call beside it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import threading
from collections import deque
from pathlib import Path

import pytest

from pegboard.conformance.collecting import InMemory
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.outcomes import Outcomes
from pegboard.plugins.kv_tiers.api import StorageError
from pegboard.plugins.kv_tiers.suite.kv_storage import KVStorageContract
from pegboard.plugins.storage_files.storage import FilesStorage
from tests.fakes.storages import FakeStorage
from tests.fakes.test_storages import TestFakeStorage as Suite
from tests.mutants.slot_storage import SlotStorage
from tests.plugins.storage_files.test_conformance import TestFiles as FilesSuite

FAR = float("inf")
QUIET = ("-p", "no:faulthandler", "-p", "no:threadexception", "-p", "no:unraisableexception", "-p", "no:timeout")
KEPT: list[int] = []


class Hides(FakeStorage):
    """Forgets in memory what is on the disk."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.hidden = set()

    def exists(self, keys, deadline):
        return next((n for n, key in enumerate(keys) if key in self.hidden), super().exists(keys, deadline))

    def get(self, keys, into, deadline):
        count = next((n for n, key in enumerate(keys) if key in self.hidden), len(keys))
        return super().get(keys[:count], into[:count], deadline)

    def set(self, keys, blocks, deadline):
        self.hidden -= set(keys)
        return super().set(keys, blocks, deadline)


class DeletedBlocksComeBack(Hides):
    def delete(self, keys):
        self.hidden |= set(keys)


class ClearedBlocksComeBack(Hides):
    def clear(self):
        self.hidden |= self.place.blocks.keys()


class CutsZerosFromKeys(FakeStorage):
    """As one does that keeps keys in fields of equal length, and reads them at the start."""

    def close(self):
        self.place.blocks = {key.rstrip(b"\0"): block for key, block in self.place.blocks.items()}


class MakesTheFolder(FakeStorage):
    @classmethod
    def supports(cls, options, ctx):
        Path(options.place, "kv").mkdir(exist_ok=True)
        return


class TriesToOpen(FakeStorage):
    """To see whether it can be opened, and leaves it so."""

    @classmethod
    def supports(cls, options, ctx):
        KEPT.append(os.open(options.place, os.O_RDONLY))
        return


class LeavesFilesOpen(FakeStorage):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.file = os.open(options.place, os.O_RDONLY)


class LeavesItsThread(FakeStorage):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.stop = threading.Event()
        threading.Thread(target=self.stop.wait, args=(9.0,), name="sweeper", daemon=True).start()


class TrustsTheFolder(FakeStorage):
    """To be the one that it has opened at the start."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.number = Path(options.place).stat().st_ino

    def set(self, keys, blocks, deadline):
        if Path(self.options.place).stat().st_ino != self.number:
            raise StorageError("stale handle")
        return super().set(keys, blocks, deadline)


class RemembersEachKey(FakeStorage):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.used = {}

    def set(self, keys, blocks, deadline):
        self.used.update(dict.fromkeys(keys, 1.0))
        return super().set(keys, blocks, deadline)


class RemembersMisses(FakeStorage):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.missed = []

    def exists(self, keys, deadline):
        count = super().exists(keys, deadline)
        self.missed += keys[count : count + 1]
        return count


class RemembersTheLastKeys(FakeStorage):
    """So many of them, which is right."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.last: deque[bytes] = deque(maxlen=500)

    def set(self, keys, blocks, deadline):
        self.last += keys
        return super().set(keys, blocks, deadline)


class ReadsWithoutTheLock(SlotStorage):
    def read(self, key, out):
        slot = self.index.get(key)
        if slot is None:
            return False
        if self.take(key, self.slots[slot], out):
            return True
        self.free.append(slot)  # what lies there is damaged, it seems
        return False


class ReadsUnchecked(ReadsWithoutTheLock):
    def take(self, key, framed, out):
        out.cast("B")[:] = framed[self.frames.header_bytes :]
        return True


class SeeksWithoutTheLock(SlotStorage):
    """All threads read from where the last one has gone to."""

    def read(self, key, out):
        if key not in self.index:
            return False
        self.at = self.index[key]
        return self.take(key, self.slots[self.at], out)


class ListsBeforeItWrites(SlotStorage):
    def write(self, key, block):
        if key in self.index:
            return
        with self.lock:
            slot = self.free_slot()
            self.index[key] = slot
        self.slots[slot] = self.frames.header(key, block) + block


class TwoTakeOneSlot(SlotStorage):
    def free_slot(self):
        if not self.free:
            return super().free_slot()
        slot = self.free[-1]
        self.lock.release()
        self.lock.acquire()
        return self.free.pop() if self.free and self.free[-1] == slot else slot


class WritesWhenItIsClosed(FilesStorage):
    """Gathers what is written. Whatever it is asked for is there, as long as its process lives."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.gathered = {}

    def set(self, keys, blocks, deadline):
        self.gathered |= {key: bytes(block) for key, block in zip(keys, blocks, strict=True)}
        return len(keys)

    def exists(self, keys, deadline):
        return next(
            (
                n
                for n, key in enumerate(keys)
                if not (key in self.gathered or super(type(self), self).exists([key], FAR))
            ),
            len(keys),
        )

    def get(self, keys, into, deadline):
        for count, (key, out) in enumerate(zip(keys, into, strict=True)):
            if key in self.gathered:
                out.cast("B")[:] = self.gathered[key]
            elif not super().get([key], [out], deadline):
                return count
        return len(keys)

    def close(self):
        super().set(list(self.gathered), [memoryview(block) for block in self.gathered.values()], FAR)
        super().close()


class KeepsAListInPlace(FilesStorage):
    """Of its blocks, which it reads at the start; it is written anew each time."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.list = Path(options.dir, "list.json")
        self.names = json.loads(self.list.read_text()) if self.list.exists() else []

    def set(self, keys, blocks, deadline):
        count = super().set(keys, blocks, deadline)
        self.names += [key.hex() for key in keys[:count]]
        self.list.write_text(json.dumps(self.names))
        return count


class WritesItsListAnew(KeepsAListInPlace):
    """Where it stands, when it is opened."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.list.write_text(json.dumps(self.names))

    def set(self, keys, blocks, deadline):
        return FilesStorage.set(self, keys, blocks, deadline)


class AnswersAnEmptyText(FakeStorage):
    @classmethod
    def supports(cls, options, ctx):
        return ""


class StopsAtDamage(FilesStorage):
    """As one does that reads a log from its start, and takes what is damaged for its end."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.order = Path(options.dir, "order.json")
        self.names = json.loads(self.order.read_text()) if self.order.exists() else []
        for place, name in enumerate(self.names):
            if FilesStorage.get(self, [bytes.fromhex(name)], [memoryview(bytearray(ctx.block_bytes))], FAR) == 0:
                FilesStorage.delete(self, [bytes.fromhex(name) for name in self.names[place:]])

    def set(self, keys, blocks, deadline):
        self.names += [key.hex() for key in keys]
        return super().set(keys, blocks, deadline)

    def close(self):
        self.order.write_text(json.dumps(self.names))
        super().close()


PERSISTENT = frozenset({"persistent"})
MUTANTS = [
    Mutant(cls, suite=Suite, caught_by=test, says=says)
    for cls, test, says in [
        (DeletedBlocksComeBack, "test_what_is_removed_stays_removed", "were deleted before the storage was closed"),
        (ClearedBlocksComeBack, "test_what_is_removed_stays_removed", "were cleared before the storage was closed"),
        (CutsZerosFromKeys, "test_any_keys_outlive_what_wrote_them", "after a restart blocks are missing"),
        (MakesTheFolder, "test_supports_changes_nothing", "/kv (new): it only looks"),
        (TriesToOpen, "test_supports_changes_nothing", "supports() leaves open"),
        (LeavesFilesOpen, "test_close_lets_go", "close() leaves open"),
        (LeavesItsThread, "test_close_lets_go", "close() leaves threads running: sweeper"),
        (TrustsTheFolder, "test_a_folder_may_be_replaced", "StorageError: stale handle"),
        (RemembersEachKey, "test_keys_are_not_kept", "(self.used)"),
        (RemembersMisses, "test_keys_are_not_kept", "(self.missed)"),
    ]
]
MUTANTS[1:1] = [
    Mutant(
        cls,
        suite=KVStorageContract,
        caught_by="test_calls_may_meet_anywhere",
        provides=frozenset(),
        base=SlotStorage,
        says=says,
    )
    for cls, says in [
        (ReadsWithoutTheLock, "where replaced_amid_get"),
        (ReadsUnchecked, "get reads other bytes than those written"),
        (SeeksWithoutTheLock, "where get_amid_get"),
        (ListsBeforeItWrites, "where read_amid_set"),
        (TwoTakeOneSlot, "where set_amid_set"),
    ]
]
MUTANTS += [
    Mutant(WritesWhenItIsClosed, FilesSuite, "test_blocks_outlive_what_wrote_them", says="what wrote them was crashed"),
    Mutant(
        WritesItsListAnew, FilesSuite, "test_a_crash_amid_a_call", base=FilesStorage, says="amid open, at its change"
    ),
    Mutant(AnswersAnEmptyText, Suite, "test_clear_removes_everything", says="supports() answers ''"),
    Mutant(StopsAtDamage, FilesSuite, "test_damage_costs_its_block_alone", says="only another one was damaged"),
    Mutant(KeepsAListInPlace, FilesSuite, "test_a_crash_amid_a_call", says="amid set, at its change"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)


class Locks(FilesStorage):
    """Its place is its own, as long as it is open or its process lives."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.locked = os.open(Path(options.dir, f"{ctx.identity}.lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self.locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError("another one has it open") from error

    def close(self):
        super().close()
        os.close(self.locked)


class LockedSuite(FilesSuite):
    factory = Locks
    provides = PERSISTENT
    impossible = {"too_long": "for the sake of the test", "empty": "the same"}


class RemembersSuite(Suite):
    factory = RemembersTheLastKeys


class OddKinds(FilesSuite):
    impossible = {"too_big": "there is no such kind"}


def outcomes_of(cls: type[KVStorageContract], words: str) -> tuple[Outcomes, str]:
    outcomes, output = Outcomes(), io.StringIO()
    with contextlib.redirect_stdout(output):
        runner = InMemory("kv_storage", lambda: {cls.__name__: cls})
        runner.run(
            "-rs", "--capture=no", "-p", "no:threadexception", "-p", "no:faulthandler", "-k", words, plugins=[outcomes]
        )
    return outcomes, output.getvalue()


@pytest.mark.full
def test_a_place_may_be_locked() -> None:
    """By what is open there: a crash is one, with its process gone."""
    outcomes, output = outcomes_of(LockedSuite, "outlive or stays_removed or crash_amid or lets_go or are_misses")
    assert not outcomes.failed + outcomes.errors, output
    assert len(outcomes.passed) == 17
    assert "a block cannot be too_long: for the sake of the test" in output


@pytest.mark.full
def test_a_bounded_memory_of_keys_is_right() -> None:
    outcomes, output = outcomes_of(RemembersSuite, "keys_are_not_kept")
    assert len(outcomes.passed) == 1, output


def test_kinds_of_damage_have_names() -> None:
    outcomes, output = outcomes_of(OddKinds, "are_misses")
    assert outcomes.failed
    assert "impossible names ['too_big']; kinds of damage are gone, empty, cut_off" in output
