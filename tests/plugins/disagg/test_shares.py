"""Heads that come from other ranks than they go to: the plan, and reads that end as the test wants."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.conformance.admission_gate import ManualClock
from pegboard.conformance.properties import properties
from pegboard.core.interfaces.kv_transfer import TransferError, TransferState
from pegboard.plugins.disagg.decode_room import DecodeRoom
from pegboard.plugins.disagg.ranges import SlotParts, ranges_of
from pegboard.plugins.disagg.reading import Reader
from pegboard.plugins.disagg.shares import MAX_RANKS, Heads, Layout, held, objection, shares
from pegboard.toolkit.transfer.alike import alike
from tests.plugins.disagg.ranks import INSTANCE, room_of
from tests.plugins.disagg.wire import HEADS, Memory, VirtualTransfer

SIZES = (1, 2, 4, 8)

# ---- the plan --------------------------------------------------------------------------------------------------------


def test_every_head_is_read_once_from_a_rank_that_has_it() -> None:
    """For all sizes, ranks and numbers of heads: what is read is followed head by head, and is the right one."""
    for here, there, heads in itertools.product(SIZES, SIZES, range(1, 17)):
        if objection([heads], here) or objection([heads], there):
            continue
        for rank in range(here):
            own, got = held(heads, rank, here), dict[int, int]()
            for share in shares(Layout((heads,), (2,), rank, here), there):
                has = held(heads, share.rank, there)
                given_away, place = share.there[0], share.here[0]
                assert 0 <= given_away.first < given_away.stop <= has.width
                for i in range(given_away.width):
                    assert place.first + i not in got
                    got[place.first + i] = has.first + given_away.first + i
                assert place.width == given_away.width
            assert got == {at: own.first + at for at in range(own.width)}, (here, there, heads, rank)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("heads", range(1, 17))
def test_all_ranks_together_have_all_heads(heads: int, size: int) -> None:
    if heads % size and size % heads:
        assert f"{heads} heads cannot be dealt out to {size} ranks" in objection([heads], size)
        with pytest.raises(ValueError, match="cannot be dealt out"):
            shares(Layout((heads,), (2,)), size)
        with pytest.raises(ValueError, match="cannot be dealt out"):
            shares(Layout((heads,), (2,), 0, size), 1)
    else:
        had = [head for rank in range(size) for head in range(*held(heads, rank, size))]
        assert had == sorted(list(range(heads)) * max(1, size // heads))


def test_of_ranks_with_the_same_heads_each_reads_from_its_own() -> None:
    """And where there are fewer or more of them, the work is spread."""
    chosen = [[one.rank for one in shares(Layout((2,), (4,), rank, 8), 8)] for rank in range(8)]
    assert chosen == [[rank] for rank in range(8)]
    assert [shares(Layout((2,), (4,), rank, 8), 4)[0].rank for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [shares(Layout((2,), (4,), rank, 4), 8)[0].rank for rank in range(4)] == [0, 2, 4, 6]


def test_regions_may_differ_in_their_heads() -> None:
    """A rank that gives of one region only gives nothing of the other."""
    found = shares(Layout((4, 1), (8, 8)), 2)
    assert [(one.rank, one.there, one.here) for one in found] == [
        (0, (Heads(0, 2), Heads(0, 1)), (Heads(0, 2), Heads(0, 1))),
        (1, (Heads(0, 2), Heads(0, 0)), (Heads(2, 4), Heads(0, 0))),
    ]


@pytest.mark.parametrize("size", [0, -1, MAX_RANKS + 1])
def test_numbers_of_ranks_that_cannot_be(size: int) -> None:
    assert f"not {size}" in objection([8], size)


@given(tokens=st.integers(1, 50), spread=st.booleans())
@properties()
def test_how_many_pieces_that_makes(tokens: int, spread: bool) -> None:
    """What docs/disaggregation.md says to users of one-sided engines: a piece per token and region."""
    slots = np.arange(tokens, dtype=np.int32) * (2 if spread else 1)
    whole, half = SlotParts((8, 8), (0, 0), (8, 8)), SlotParts((16, 16), (8, 8), (16, 16))
    for pieces in alike(ranges_of(slots, whole), ranges_of(slots, half)):
        assert len(pieces) == 2 * tokens


# ---- when shares fail or are abandoned -------------------------------------------------------------------------------


class Virtual:
    """A reader of two ranks, whose reads end when the test wants."""

    def __init__(self, ranks: int = 2) -> None:
        peers: dict[str, VirtualTransfer] = {}
        clock = ManualClock()
        self.sources = [Memory(8, rank, ranks) for rank in range(ranks)]
        for rank, memory in enumerate(self.sources):
            peers[f"{INSTANCE.hex()}/{rank}"] = VirtualTransfer(memory, clock, peers)
        self.memory = Memory(8)
        self.engine = VirtualTransfer(self.memory, clock, peers)
        self.reader = Reader(self.engine, Layout((HEADS, HEADS), (2, 4)), 2**20)
        self.reader.meet(INSTANCE, "127.0.0.1", [b"virtual"] * ranks)
        for slot in range(4):
            self.memory.owner[slot] = "rid"
            for memory in self.sources:
                memory.put(slot + 4, 1000 + slot)
        self.room = room_of(np.arange(4, dtype=np.int32), np.arange(4, 8, dtype=np.int32))

    def end(self, at: int, state: TransferState) -> list[tuple[DecodeRoom, str]]:
        """End one of the reads under way."""
        self.engine.end(list(self.engine.reads.values())[at], state)
        return self.reader.poll([self.room])

    def right(self) -> bool:
        return all(self.memory.holds(slot, 1000 + slot) for slot in range(4))


@pytest.mark.parametrize("first", [0, 1])
def test_a_piece_is_here_once_all_its_shares_are(first: int) -> None:
    made = Virtual()
    made.reader.begin([made.room])
    assert len(made.engine.reads) == 2
    assert not made.end(first, TransferState.DONE)
    assert made.room.here == 0
    assert not made.right()
    assert not made.end(0, TransferState.DONE)
    assert made.room.here == 4
    assert made.right()


@pytest.mark.parametrize("late", [TransferState.DONE, TransferState.FAILED, TransferState.GONE])
@pytest.mark.parametrize("first", [0, 1])
def test_a_share_that_fails_takes_the_others_with_it(first: int, late: TransferState) -> None:
    """They are waited for, however they end, and then everything is read again."""
    made = Virtual()
    made.reader.begin([made.room])
    assert [room for room, _ in made.end(first, TransferState.FAILED)] == [made.room]
    assert [read.abandoned for read in made.engine.reads.values()] == [True]
    assert made.room.handles == set(made.engine.reads)
    made.reader.begin([made.room])
    assert len(made.engine.reads) == 1, "nothing is read into a seat that is still written to"
    assert not made.end(0, late)
    assert made.room.here == 0
    made.reader.begin([made.room])
    assert len(made.engine.reads) == 2
    for _ in range(2):
        assert not made.end(0, TransferState.DONE)
    assert made.room.here == 4
    assert made.right()


def test_a_share_that_has_failed_after_the_other_one_was_here() -> None:
    made = Virtual()
    made.reader.begin([made.room])
    assert not made.end(0, TransferState.DONE)
    assert made.end(0, TransferState.FAILED)
    assert made.room.here == 0
    assert not made.room.handles
    made.reader.begin([made.room])
    assert len(made.engine.reads) == 2


@pytest.mark.parametrize("first", [0, 1])
def test_a_seat_is_out_of_use_until_all_shares_are_over(first: int) -> None:
    made = Virtual()
    made.reader.begin([made.room])
    assert made.reader.leave(made.room)
    made.end(first, TransferState.GONE)
    assert not made.reader.safe()
    assert made.reader.quarantined == 1
    made.end(0, TransferState.GONE)
    assert made.reader.safe() == ["rid"]
    assert made.reader.quarantined == made.reader.under_way == 0


@pytest.mark.parametrize("missing", [0, 1])
def test_a_share_that_cannot_be_begun_leaves_none_that_counts(missing: int) -> None:
    """What was begun before it is abandoned, and its seat waits for that."""
    made = Virtual()
    made.engine.known.discard(f"{INSTANCE.hex()}/{missing}")
    with pytest.raises(TransferError):
        made.reader.begin([made.room])
    assert made.room.here == 0
    assert [read.abandoned for read in made.engine.reads.values()] == [True] * missing
    assert made.reader.leave(made.room) is bool(missing)
    if missing:
        made.end(0, TransferState.GONE)
        assert made.reader.safe() == ["rid"]
