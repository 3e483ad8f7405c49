"""Broken storages of KV blocks, and the tests of the suite that notice."""

from __future__ import annotations

import dataclasses
import time

import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.kv_tiers.api import KVStorageContext, StorageError
from pegboard.toolkit.cache.block_frames import MAGIC, BlockFrames
from tests.fakes.storages import FakeStorage
from tests.fakes.test_storages import TestFakeStorage as Suite

FAR = float("inf")


class NoChecksum(FakeStorage):
    """Looks at key and length, and not at the bytes."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)

        class Unchecked(BlockFrames):
            def header(self, key, block):
                return super().header(key, bytes(self.block_bytes))

        self.frames = Unchecked(ctx.identity, ctx.block_bytes)


class KeyNotChecked(FakeStorage):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)

        class AnyKey(BlockFrames):
            def header(self, key, block):
                return super().header(b"", block)

        self.frames = AnyKey(ctx.identity, ctx.block_bytes)


class IdentityNotChecked(FakeStorage):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.frames = BlockFrames("", ctx.block_bytes)


class VersionNotChecked(FakeStorage):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)

        class AnyVersion(BlockFrames):
            def fits(self, header, key, block):
                return super().fits(MAGIC + b"\1\0" + bytes(header)[len(MAGIC) + 2 :], key, block)

        self.frames = AnyVersion(ctx.identity, ctx.block_bytes)


class KeepsDamagedBlocks(FakeStorage):
    def get(self, keys, into, deadline):
        before = dict(self.place.blocks)
        count = super().get(keys, into, deadline)
        self.place.blocks.update({key: block for key, block in before.items() if key in keys})
        return count


class WritesInPlace(FakeStorage):
    """A block is there, half of it old, while it is being written; nothing is checked."""

    def set(self, keys, blocks, deadline):
        for key, block in zip(keys, blocks, strict=True):
            half = len(block) // 2
            self.place.blocks[key] = bytes(block[:half]) + bytes(len(block) - half)
            time.sleep(0.002)
            self.place.blocks[key] = bytes(block)
        return len(keys)

    def get(self, keys, into, deadline):
        for count, (key, out) in enumerate(zip(keys, into, strict=True)):
            block = self.place.blocks.get(key)
            if block is None:
                return count
            out.cast("B")[:] = block
        return len(keys)


class CountsBehindGaps(FakeStorage):
    def exists(self, keys, deadline):
        return sum(super(CountsBehindGaps, self).exists([key], deadline) for key in keys)


class ReadsBehindGaps(FakeStorage):
    def get(self, keys, into, deadline):
        read = super().get
        return sum(read([key], [out], deadline) for key, out in zip(keys, into, strict=True))


class IgnoresIdentity(FakeStorage):
    def __init__(self, options, ctx):
        super().__init__(options, dataclasses.replace(ctx, identity="00"))


class CutsIdentity(FakeStorage):
    def __init__(self, options, ctx):
        super().__init__(options, dataclasses.replace(ctx, identity=ctx.identity[:-1]))


class CutsKeys(FakeStorage):
    """As one does that takes every key for a digest of 32 bytes."""

    def exists(self, keys, deadline):
        return super().exists([key[:32] for key in keys], deadline)

    def get(self, keys, into, deadline):
        return super().get([key[:32] for key in keys], into, deadline)

    def set(self, keys, blocks, deadline):
        return super().set([key[:32] for key in keys], blocks, deadline)


class IgnoresDeadlines(FakeStorage):
    def set(self, keys, blocks, deadline):
        return super().set(keys, blocks, FAR)


class TimesOut(FakeStorage):
    def get(self, keys, into, deadline):
        if self.ctx.clock() >= deadline:
            raise StorageError("too late")
        return super().get(keys, into, deadline)


class LooksAtTheClockOnce(FakeStorage):
    def get(self, keys, into, deadline):
        return super().get(keys, into, FAR) if self.ctx.clock() < deadline else 0


class RefusesTheSame(FakeStorage):
    def set(self, keys, blocks, deadline):
        count = next((n for n, key in enumerate(keys) if key in self.place.blocks), len(keys))
        return super().set(keys[:count], blocks[:count], deadline)


class WritesAround(FakeStorage):
    """Reads a byte more than the buffer has."""

    def get(self, keys, into, deadline):
        count = super().get(keys, into, deadline)
        for view in into[:count]:
            memoryview(view.obj).cast("B")[-1:] = b"\0"
        return count


class ForgetsAtTheEnd(FakeStorage):
    def close(self):
        self.place.lose()


class KeepsToItself(FakeStorage):
    def __init__(self, options, ctx: KVStorageContext):
        super().__init__(options.model_copy(update={"place": f"mine {id(self)}"}), ctx)


class DeletesOnlyTheFirst(FakeStorage):
    def delete(self, keys):
        super().delete(keys[:1])


class ClearsSome(FakeStorage):
    def clear(self):
        self.place.lose(list(self.place.blocks)[::2])


class StumblesOverMany(FakeStorage):
    def set(self, keys, blocks, deadline):
        if len(keys) > 4096:
            raise StorageError("-1")
        return super().set(keys, blocks, deadline)


CAUGHT = {
    NoChecksum: "test_no_bit_may_flip",
    VersionNotChecked: "test_no_bit_may_flip",
    KeyNotChecked: "test_blocks_cannot_be_exchanged",
    IdentityNotChecked: "test_blocks_cannot_be_exchanged",
    KeepsDamagedBlocks: "test_damaged_blocks_are_misses",
    WritesInPlace: "test_a_block_appears_all_at_once",
    CountsBehindGaps: "test_hits_count_from_the_first_on",
    ReadsBehindGaps: "test_hits_count_from_the_first_on",
    IgnoresIdentity: "test_another_identity_finds_nothing",
    CutsIdentity: "test_another_identity_finds_nothing",
    CutsKeys: "test_any_keys",
    IgnoresDeadlines: "test_no_call_outlives_its_deadline",
    TimesOut: "test_no_call_outlives_its_deadline",
    LooksAtTheClockOnce: "test_a_deadline_amid_a_call",
    RefusesTheSame: "test_writing_again_is_harmless",
    WritesAround: "test_round_trip",
    ForgetsAtTheEnd: "test_blocks_outlive_what_wrote_them",
    KeepsToItself: "test_several_share_a_place",
    DeletesOnlyTheFirst: "test_deleted_blocks_are_gone",
    ClearsSome: "test_clear_removes_everything",
    StumblesOverMany: "test_many_keys_in_a_call",
}
MUTANTS = [Mutant(cls, suite=Suite, caught_by=test) for cls, test in CAUGHT.items()]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
