"""Reads between virtual ranks of other sizes, by real engines: every byte is compared."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from unittest.mock import Mock, patch

import numpy as np
import pytest

from pegboard.core.interfaces.kv_transfer import TransferError
from pegboard.plugins.disagg.decode_room import DecodeRoom
from pegboard.plugins.disagg.messages import RoomKey
from pegboard.plugins.disagg.ranges import SlotParts, ranges_of
from pegboard.plugins.disagg.reading import Reader
from pegboard.plugins.disagg.shares import held
from pegboard.plugins.transfer_inproc.transfer import InprocTransfer
from tests.plugins.disagg.ranks import (
    BUILD,
    HEAD_COUNTS,
    INSTANCE,
    LEASE,
    SLOTS,
    Ranks,
    read_all,
    room_of,
    slots_of,
    whole,
)
from tests.plugins.transfer_mooncake import fake_engine
from tests.plugins.transfer_nixl import fake_nixl

STAGED = ("nixl", "mooncake")
"""Engines that read slices of heads by way of blocks."""


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes of NIXL and Mooncake."""
    fake_nixl.install(monkeypatch)
    fake_engine.install(monkeypatch)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    for one in ranks.made:
        one.engine.close()


@pytest.mark.parametrize("engine", BUILD)
@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 4), (4, 2), (8, 1), (1, 8)])
def test_what_other_ranks_have_is_read(ranks: Ranks, engine: str, here: int, there: int) -> None:
    """Two pools of half the heads into one, one pool by two readers, and more of them: byte by byte, in several pieces,
    and nothing beside them.
    """
    sources, targets = ranks.make(there, engine), ranks.make(here, engine)
    ours, theirs = slots_of(1), slots_of(2)
    start, before = 6, [[buffer.copy() for buffer in one.buffers] for one in targets]
    tokens = 64 if engine in STAGED else 8
    made = [(ranks.reader(one, sources, most_bytes=tokens * sum(one.layout.slot_bytes)), one) for one in targets]
    rooms = [(reader, room_of(ours, theirs, start)) for reader, _ in made]
    read_all(rooms)
    read = ours[start:]
    for (region, total), (rank, one) in itertools.product(enumerate(HEAD_COUNTS), enumerate(targets)):
        right = whole(sources[:: max(1, there // total)], region, theirs[start:])
        own = held(total, rank, here)
        assert np.array_equal(one.heads(region, read), right[:, own.first : own.stop])
    for one, old in zip(targets, before, strict=True):
        for buffer, was in zip(one.buffers, old, strict=True):
            others = np.setdiff1d(np.arange(SLOTS), read)
            assert np.array_equal(buffer.reshape(SLOTS, -1)[others], was.reshape(SLOTS, -1)[others])
    if engine in STAGED:
        assert all(
            one.engine.stats()["staged_bytes_total"] > one.engine.stats()["read_bytes_total"] / 2 for one in targets
        )


def test_a_server_that_cannot_be_read_is_not_known(ranks: Ranks) -> None:
    """Where one of its ranks is described wrongly nothing of it stays."""
    sources, (target,) = ranks.make(2, "inproc"), ranks.make(1, "inproc")
    reader = Reader(target.engine, target.layout, 2**20)
    right = [one.engine.describe() for one in sources]
    for wrong in ([right[0], b"wrong"], [right[0]] * 3):
        with pytest.raises(TransferError):
            reader.meet(INSTANCE, "127.0.0.1", wrong)
    with pytest.raises(KeyError):
        reader.begin([room_of(slots_of(1), slots_of(2))])
    nothing = ranges_of(slots_of(1)[:0], SlotParts((1,), (0,), (1,)))
    with pytest.raises(TransferError, match="not connected"):
        target.engine.read(f"{INSTANCE.hex()}/0", LEASE, nothing, nothing)
    for one in sources:
        one.engine.allow(LEASE)
    reader.meet(INSTANCE, "127.0.0.1", right)
    read_all([(reader, room_of(slots_of(1), slots_of(2)))])
    reader.keep([])
    with pytest.raises(TransferError, match="not connected"):
        target.engine.read(f"{INSTANCE.hex()}/1", LEASE, nothing, nothing)


def test_an_engine_without_descriptors_is_asked_again(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises is the matter of that server's rooms, and of nothing else."""
    (source,), (target,) = ranks.make(1, "inproc"), ranks.make(1, "inproc")
    reader = Reader(target.engine, target.layout, 2**20)
    source.engine.allow(LEASE)
    with monkeypatch.context() as context:
        context.setattr(target.engine, "connect", Mock(side_effect=OSError(24, "Too many open files")))
        with pytest.raises(TransferError, match=r"OSError.*Too many open files"):
            reader.meet(INSTANCE, "127.0.0.1", [source.engine.describe()])
    reader.meet(INSTANCE, "127.0.0.1", [source.engine.describe()])
    read_all([(reader, room_of(slots_of(1), slots_of(2)))])


def test_reads_of_a_server_that_was_forgotten_do_not_count_when_it_is_back(ranks: Ranks) -> None:
    """After a read has failed it is connected to again, as soon as nothing is under way."""
    (source,), (target,) = ranks.make(1, "inproc"), ranks.make(1, "inproc")
    engine, reader = target.engine, ranks.reader(target, [source])
    assert isinstance(engine, InprocTransfer)
    engine.faults.stalled, engine.faults.linger = True, 0.05
    old = room_of(slots_of(1), slots_of(2))
    reader.begin([old])
    assert reader.leave(old)
    reader.keep([])
    reader.meet(INSTANCE, "127.0.0.1", [source.engine.describe()])
    until = time.monotonic() + 30.0
    while not reader.safe():
        assert time.monotonic() < until
        reader.poll([])
    engine.faults.stalled, engine.faults.lost = False, True
    room = room_of(slots_of(1), slots_of(2))
    reader.begin([room])
    while not reader.poll([room]):
        assert time.monotonic() < until
    engine.faults.lost = False
    with patch.object(engine, "disconnect", wraps=engine.disconnect) as disconnect:
        read_all([(reader, room_of(slots_of(1), slots_of(2)))])
    assert disconnect.called


@pytest.mark.parametrize("room", [6, 7])
def test_a_room_is_read_from_its_data_parallel_rank(ranks: Ranks, room: int) -> None:
    """Of four ranks two are of each: the room's number says of which."""
    sources, (target,) = [*ranks.make(2, "inproc"), *ranks.make(2, "inproc")], ranks.make(1, "inproc")
    reader = Reader(target.engine, target.layout, 2**20)
    reader.meet(INSTANCE, "127.0.0.1", [one.engine.describe() for one in sources], dp_size=2)
    for one in sources:
        one.engine.allow(LEASE)
    ours, theirs = slots_of(1), slots_of(2)
    made = room_of(ours, theirs)
    made.key = RoomKey(room)
    read_all([(reader, made)])
    right = sources[:2] if room % 2 == 0 else sources[2:]
    assert all(np.array_equal(whole([target], at, ours), whole(right, at, theirs)) for at in range(len(HEAD_COUNTS)))


def test_a_rank_that_goes_fails_the_room(ranks: Ranks) -> None:
    """Over TCP, where the other rank would give its share."""
    sources, (target,) = ranks.make(2, "tcp"), ranks.make(1, "tcp")
    reader = ranks.reader(target, sources)
    room = room_of(slots_of(1), slots_of(2))
    sources[1].engine.close()
    reader.begin([room])
    until, failed = time.monotonic() + 30.0, list[tuple[DecodeRoom, str]]()
    while not failed or room.stale:
        assert time.monotonic() < until
        failed += reader.poll([room])
    assert [one for one, _ in failed] == [room]
    assert room.here == 0


@pytest.mark.parametrize("engine", BUILD)
def test_after_all_shares_are_over_nothing_is_written(ranks: Ranks, engine: str) -> None:
    """Whenever the request goes: its seat can be given to another one as soon as it is called safe."""
    sources, (target,) = ranks.make(2, engine), ranks.make(1, engine)
    reader = ranks.reader(target, sources)
    for wait in (0.0, 0.0005, 0.002):
        room = room_of(slots_of(1), slots_of(2))
        reader.begin([room])
        assert reader.under_way == 2
        time.sleep(wait)
        until, safe = time.monotonic() + 30.0, ["rid"] if not reader.leave(room) else []
        while not safe:
            assert time.monotonic() < until
            assert not reader.poll([])
            safe = reader.safe()
        assert safe == ["rid"]
        assert reader.quarantined == reader.under_way == 0
        before = [buffer.copy() for buffer in target.buffers]
        for one in sources:
            for buffer in one.buffers:
                buffer += 1
        time.sleep(0.02)
        assert not reader.poll([])
        assert all(np.array_equal(one, old) for one, old in zip(target.buffers, before, strict=True))
    last = room_of(slots_of(1), slots_of(2))
    read_all([(reader, last)])
    for region in range(len(HEAD_COUNTS)):
        assert np.array_equal(whole([target], region, slots_of(1)), whole(sources, region, slots_of(2)))


@pytest.mark.parametrize("every", [2, 3])
def test_shares_that_fail_halfway_are_read_again(ranks: Ranks, every: int) -> None:
    """Every second or third read of the engine does: what is here in the end is right all the same."""
    sources, (target,) = ranks.make(2, "inproc"), ranks.make(1, "inproc")
    reader = ranks.reader(target, sources, most_bytes=16 * sum(target.layout.slot_bytes))
    room, failures = room_of(slots_of(1), slots_of(2)), 0
    assert isinstance(target.engine, InprocTransfer)
    until = time.monotonic() + 30.0
    while room.here < room.length or room.stale:
        assert time.monotonic() < until
        target.engine.faults.fail_every = every if failures < 5 else 0
        reader.begin([room])
        failures += len(reader.poll([room]))
    assert failures == 5
    for region in range(len(HEAD_COUNTS)):
        assert np.array_equal(whole([target], region, slots_of(1)), whole(sources, region, slots_of(2)))
