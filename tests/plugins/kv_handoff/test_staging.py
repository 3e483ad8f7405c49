"""Small pieces by way of blocks: whose the blocks are, whatever happens to readers and sources."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest

from pegboard.plugins.kv_handoff.api import staging_source
from pegboard.plugins.kv_handoff.api.pieces import Memory
from pegboard.plugins.kv_handoff.api.staging import Staging, StagingOptions
from pegboard.plugins.kv_handoff.api.staging_source import Collector
from pegboard.plugins.kv_handoff.api.transfer import KVTransferContext, Ranges, Region, TransferError, TransferState
from pegboard.plugins.kv_handoff.suite.rig import LEASE, ranges
from tests.plugins.kv_handoff.conftest import Make
from tests.plugins.kv_handoff.toy import BLOCK, SECONDS, SIZE, SLOT, Server, slots

DONE, FAILED, GONE = TransferState.DONE, TransferState.FAILED, TransferState.GONE
BY_BLOCK = BLOCK // SLOT


def pair(make: Make, blocks: int = 4) -> tuple[Server, Server]:
    source, reader = make(blocks), make(blocks)
    reader.connect(source)
    return source, reader


def test_small_pieces_come_in_few_large_ones(make: Make) -> None:
    """Each read of the library is one range, out of a block into a block."""
    source, reader = pair(make)
    wanted, target = slots(1), slots(2)
    for _ in range(5):
        assert reader.wait(reader.read(wanted, target)).state is DONE
        assert reader.holds(target, source, wanted)
        source.memory += np.uint8(1)
    assert [len(part.source) for part in reader.engine.begun] == [1] * (5 * len(wanted) // BY_BLOCK)
    assert {(int(part.source.region[0]), int(part.target.region[0])) for part in reader.engine.begun} == {(1, 1)}
    assert (
        reader.engine.stats()["staged_bytes_total"]
        == source.engine.stats()["collected_bytes_total"]
        == 5 * wanted.total
    )
    assert source.taken == reader.taken == 0


def test_no_order_counts_twice(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even while the thread that has collected it loses the processor."""
    forget = Collector.__dict__["_forget"]

    def slowly(self: Collector, reader: object, nbytes: int) -> None:
        if threading.current_thread().name == "kv-collect":
            time.sleep(0.001)
        forget(self, reader, nbytes)

    monkeypatch.setattr(Collector, "_forget", slowly)
    source, reader = pair(make, 8)
    for _ in range(3):
        jobs = [reader.read(slots(number), slots(number + 9)) for number in range(3)]
        assert [reader.wait(job).state for job in jobs] == [DONE] * 3
    assert source.taken == reader.taken == 0


def test_sides_may_be_cut_in_other_places(make: Make) -> None:
    source, reader = pair(make)
    wanted = slots(1, 512)
    target = ranges([(0, 7 + number * 100, 96) for number in range(341)] + [(0, 50_000, 32)])
    assert reader.wait(reader.read(wanted, target)).state is DONE
    assert reader.holds(target, source, wanted)
    assert reader.engine.stats()["staged_bytes_total"] == wanted.total


@pytest.mark.parametrize(
    "some",
    [
        ranges([(0, at, 20_000) for at in range(0, 200_000, 40_000)]),
        slots(3, 15),
        ranges((0, at, SLOT) for at in range(0, SIZE, SLOT)),
    ],
    ids=["large", "few", "neighbours on both sides"],
)
def test_other_reads_go_straight(make: Make, some: Ranges) -> None:
    source, reader = pair(make)
    assert reader.wait(reader.read(some, some)).state is DONE
    assert reader.holds(some, source, some)
    assert "staged_bytes_total" not in reader.engine.stats()


@pytest.mark.parametrize("off", ["source", "reader"])
def test_without_staging_on_either_side(make: Make, off: str) -> None:
    source, reader = make(0 if off == "source" else 4), make(0 if off == "reader" else 4)
    reader.connect(source)
    wanted, target = slots(1), slots(2)
    assert reader.wait(reader.read(wanted, target)).state is DONE
    assert reader.holds(target, source, wanted)
    assert max(len(part.source) for part in reader.engine.begun) == 512


def test_memory_of_other_devices_has_no_staging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        elsewhere = KVTransferContext((Region(0, 4096, 64, 1, device="cuda:0"),))
        assert Staging.made(StagingOptions(), elsewhere, SECONDS) is None
    assert "another device" in caplog.text


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_without_its_lease_nothing_is_collected(make: Make) -> None:
    _, reader = pair(make)
    news = reader.wait(reader.read(slots(1), slots(2), lease=LEASE + 1))
    assert (news.state, news.reason) == (FAILED, "the lease has ended")


def test_a_lease_that_ends_meanwhile(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written after its end is in no read that is DONE."""
    source, reader = pair(make)
    monkeypatch.setattr(staging_source, "CHUNK", BLOCK // 4)
    gather, seen = Memory.gather, list[int]()

    def ends(memory: Memory, some: Ranges, out: np.ndarray) -> None:
        gather(memory, some, out)
        seen.append(len(some))
        if len(seen) == 3:
            source.engine.revoke(LEASE)
            source.memory += np.uint8(1)

    monkeypatch.setattr(Memory, "gather", ends)
    news = reader.wait(reader.read(slots(1, BY_BLOCK), slots(2, BY_BLOCK)))
    assert (news.state, news.reason) == (FAILED, "the lease has ended")
    assert len(seen) == 3
    assert source.taken == reader.taken == 0


def test_what_was_collected_before_may_be_used(make: Make) -> None:
    source, reader = pair(make)
    wanted, target = slots(1, BY_BLOCK), slots(2, BY_BLOCK)
    reader.engine.held = {source.engine.number}
    handle = reader.read(wanted, target)
    reader.until(lambda: reader.engine.begun, "the library is not asked")
    right = source.memory.copy()
    source.engine.revoke(LEASE)
    source.memory += np.uint8(1)
    reader.engine.held.clear()
    assert reader.wait(handle).state is DONE
    source.memory[:] = right
    assert reader.holds(target, source, wanted)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_a_block_that_is_recalled_while_it_is_read(make: Make) -> None:
    """It is given to the next one, who has waited for long enough; of its first reader, which reads other bytes out of
    it by then, nothing counts.
    """
    source, slow, quick = make(1), make(1), make(1)
    for one in (slow, quick):
        one.connect(source)
    slow.engine.held = {source.engine.number}
    some, target = slots(1, BY_BLOCK), slots(2, BY_BLOCK)
    first = slow.read(some, target)
    slow.until(lambda: slow.engine.begun, "the library is not asked")
    other = slots(3, BY_BLOCK)
    second = quick.read(other, target)
    time.sleep(0.1)
    quick.poll()
    assert second not in quick.ended, "a block is given away while it is read"
    source.clock.ahead = SECONDS
    assert quick.wait(second).state is DONE
    assert quick.holds(target, source, other)
    assert source.engine.stats()["recalled_blocks_total"] == 1
    slow.engine.held.clear()
    news = slow.wait(first)
    assert news.state is FAILED, "a read is DONE with bytes of another one"
    assert "taken its block back" in news.reason
    assert slow.wait(slow.read(some, target)).state is DONE
    assert slow.holds(target, source, some)


def test_readers_wait_in_line_for_blocks(make: Make) -> None:
    source, readers = make(2), [make(2) for _ in range(4)]
    for one in readers:
        one.connect(source)
    wanted, target = slots(1), slots(2)
    handles = [[(one, one.read(wanted, target)) for one in readers] for _ in range(3)]
    for one, handle in [pair for row in handles for pair in row]:
        assert one.wait(handle).state is DONE
        assert one.holds(target, source, wanted)
    assert source.taken == 0
    assert "recalled_blocks_total" not in source.engine.stats()


def test_a_reader_that_leaves_gives_its_blocks_back(make: Make) -> None:
    source, reader = pair(make)
    reader.engine.held = {source.engine.number}
    handle = reader.read(slots(1), slots(2))
    reader.until(lambda: len(reader.engine.begun) == 4, "the library is not asked")
    assert source.taken == 4
    reader.engine.close()
    reader.until(lambda: source.taken == 0, "blocks are not given back")
    assert handle not in reader.ended
    assert len(reader.engine.dropped) == 4


def test_abandoned_reads_give_their_blocks_back(make: Make) -> None:
    source, reader = pair(make)
    reader.engine.held = {source.engine.number}
    handle = reader.read(slots(1), slots(2))
    reader.until(lambda: len(reader.engine.begun) == 4, "the library is not asked")
    reader.engine.abandon(handle)
    reader.poll()
    assert reader.taken == 4, "a block may still be written to"
    reader.engine.held.clear()
    assert reader.wait(handle).state is GONE
    assert source.taken == reader.taken == 0
    assert len(reader.engine.begun) == 4, "an abandoned read goes on"


def test_a_source_that_never_ends_a_read_stops_no_other_one(make: Make) -> None:
    """It has all blocks here, for as long as they may be written to: what is read from others goes piece by piece."""
    stuck, source, reader = make(4), make(4), make(4)
    reader.connect(stuck, "stuck")
    reader.connect(source)
    wanted, target = slots(1), slots(2)
    reader.engine.held = {stuck.engine.number}
    handle = reader.read(wanted, target, peer="stuck")
    reader.until(lambda: len(reader.engine.begun) == 4, "the library is not asked")
    assert reader.wait(reader.read(wanted, target)).state is DONE
    assert reader.holds(target, source, wanted)
    assert {len(part.source) for part in reader.engine.begun[4:]} == {256}
    reader.clock.ahead = SECONDS + 1
    late = reader.read(wanted, target, peer="stuck")
    assert reader.wait(late).state is FAILED
    assert handle not in reader.ended
    assert reader.taken == 4
    reader.engine.held.clear()
    assert reader.wait(handle).state is FAILED
    assert reader.taken == 0


def test_a_block_that_may_be_written_to_outlives_the_engine(make: Make) -> None:
    source, reader = pair(make)
    reader.engine.held = {source.engine.number}
    reader.read(slots(1), slots(2))
    reader.until(lambda: reader.engine.begun, "the library is not asked")
    before = reader.memory.copy()
    staging = reader.engine.staging
    assert staging is not None
    reader.engine.close()
    assert reader.taken > 0
    with pytest.raises(TransferError, match="closed"):
        staging.landing.deal(0, slots(2, 16))
    assert np.array_equal(reader.memory, before)


# ---- sources that fail -----------------------------------------------------------------------------------------------


def test_a_source_that_goes_amid_reads(make: Make) -> None:
    source, reader = pair(make)
    reader.engine.held = {source.engine.number}
    handle = reader.read(slots(1), slots(2))
    reader.until(lambda: reader.engine.begun, "the library is not asked")
    source.engine.close()
    reader.engine.held.clear()
    assert reader.wait(handle).state is FAILED
    assert reader.taken == 0


def test_a_collection_that_fails(make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It fails its own read, and no later one."""
    source, reader = pair(make)
    gather, seen = Memory.gather, list[int]()

    def fails(memory: Memory, some: Ranges, out: np.ndarray) -> None:
        seen.append(len(some))
        if len(seen) == 1:
            raise MemoryError("none is left")
        gather(memory, some, out)

    monkeypatch.setattr(Memory, "gather", fails)
    wanted, target = slots(1, BY_BLOCK), slots(2, BY_BLOCK)
    news = reader.wait(reader.read(wanted, target))
    assert (news.state, news.reason) == (FAILED, "the peer cannot collect the pieces of a read")
    assert "none is left" in caplog.text
    assert reader.wait(reader.read(wanted, target)).state is DONE
    assert source.taken == reader.taken == 0


def test_what_cannot_be_reached_is_read_piece_by_piece(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Where the port of orders is not reached, as behind a wall."""
    source, reader = pair(make)
    assert source.engine.staging is not None
    source.engine.staging.close()
    wanted, target = slots(1), slots(2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert reader.wait(reader.read(wanted, target)).state is DONE
    assert reader.holds(target, source, wanted)
    assert len([one for one in caplog.records if "piece by piece" in one.message]) == 1
