"""Reads between pools, by real engines: every byte is compared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from unittest.mock import Mock, patch

import numpy as np
import pytest

from pegboard.plugins.disagg.decode_room import DecodeRoom
from pegboard.plugins.disagg.ranges import ranges_of
from pegboard.plugins.disagg.reading import Reader
from pegboard.plugins.kv_handoff.api.transfer import TransferError
from pegboard.plugins.transfer_inproc.transfer import InprocTransfer
from tests.plugins.disagg.pools import (
    BUILD,
    INSTANCE,
    LEASE,
    SLOT_BYTES,
    SLOTS,
    Pools,
    read_all,
    room_of,
    same,
    slots_of,
)
from tests.plugins.transfer_mooncake import fake_engine
from tests.plugins.transfer_nixl import fake_nixl


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fakes of NIXL and Mooncake."""
    fake_nixl.install(monkeypatch)
    fake_engine.install(monkeypatch)


@pytest.fixture
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    for one in pools.made:
        one.engine.close()


@pytest.mark.parametrize("engine", BUILD)
def test_what_the_other_pool_has_is_read(pools: Pools, engine: str) -> None:
    """Byte by byte, in several pieces, and nothing beside them."""
    source, target = pools.pair(engine)
    ours, theirs, start = slots_of(1), slots_of(2), 6
    before = [buffer.copy() for buffer in target.buffers]
    read_all([(pools.reader(target, source, most_bytes=8 * sum(SLOT_BYTES)), room_of(ours, theirs, start))])
    assert same(target, ours[start:], source, theirs[start:])
    others = np.setdiff1d(np.arange(SLOTS), ours[start:])
    for buffer, was in zip(target.buffers, before, strict=True):
        assert np.array_equal(buffer.reshape(SLOTS, -1)[others], was.reshape(SLOTS, -1)[others])


def test_a_server_that_cannot_be_read_is_not_known(pools: Pools) -> None:
    source, target = pools.pair("inproc")
    reader = Reader(target.engine, SLOT_BYTES, 2**20)
    with pytest.raises(TransferError):
        reader.meet(INSTANCE, "127.0.0.1", b"wrong")
    with pytest.raises(KeyError):
        reader.begin([room_of(slots_of(1), slots_of(2))])
    nothing = ranges_of(slots_of(1)[:0], SLOT_BYTES)
    with pytest.raises(TransferError, match="not connected"):
        target.engine.read(INSTANCE.hex(), LEASE, nothing, nothing)
    source.engine.allow(LEASE)
    reader.meet(INSTANCE, "127.0.0.1", source.engine.describe())
    read_all([(reader, room_of(slots_of(1), slots_of(2)))])
    reader.keep([])
    with pytest.raises(TransferError, match="not connected"):
        target.engine.read(INSTANCE.hex(), LEASE, nothing, nothing)


def test_an_engine_without_descriptors_is_asked_again(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises is the matter of that server's rooms, and of nothing else."""
    source, target = pools.pair("inproc")
    reader = Reader(target.engine, SLOT_BYTES, 2**20)
    source.engine.allow(LEASE)
    with monkeypatch.context() as context:
        context.setattr(target.engine, "connect", Mock(side_effect=OSError(24, "Too many open files")))
        with pytest.raises(TransferError, match=r"OSError.*Too many open files"):
            reader.meet(INSTANCE, "127.0.0.1", source.engine.describe())
    reader.meet(INSTANCE, "127.0.0.1", source.engine.describe())
    read_all([(reader, room_of(slots_of(1), slots_of(2)))])


def test_reads_of_a_server_that_was_forgotten_do_not_count_when_it_is_back(pools: Pools) -> None:
    """After a read has failed it is connected to again, as soon as nothing is under way."""
    source, target = pools.pair("inproc")
    engine, reader = target.engine, pools.reader(target, source)
    assert isinstance(engine, InprocTransfer)
    engine.faults.stalled, engine.faults.linger = True, 0.05
    old = room_of(slots_of(1), slots_of(2))
    reader.begin([old])
    assert reader.leave(old)
    reader.keep([])
    reader.meet(INSTANCE, "127.0.0.1", source.engine.describe())
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


def test_a_server_that_goes_fails_the_room(pools: Pools) -> None:
    source, target = pools.pair("tcp")
    reader = pools.reader(target, source)
    room = room_of(slots_of(1), slots_of(2))
    source.engine.close()
    reader.begin([room])
    until, failed = time.monotonic() + 30.0, list[tuple[DecodeRoom, str]]()
    while not failed or room.stale:
        assert time.monotonic() < until
        failed += reader.poll([room])
    assert [one for one, _ in failed] == [room]
    assert room.here == 0


@pytest.mark.parametrize("engine", BUILD)
def test_after_a_read_is_over_nothing_is_written(pools: Pools, engine: str) -> None:
    """Whenever the request goes: its memory can be given to another one as soon as it is called safe."""
    source, target = pools.pair(engine)
    reader = pools.reader(target, source)
    for wait in (0.0, 0.0005, 0.002):
        room = room_of(slots_of(1), slots_of(2))
        reader.begin([room])
        assert reader.under_way == 1
        time.sleep(wait)
        until, safe = time.monotonic() + 30.0, ["rid"] if not reader.leave(room) else []
        while not safe:
            assert time.monotonic() < until
            assert not reader.poll([])
            safe = reader.safe()
        assert safe == ["rid"]
        assert reader.quarantined == reader.under_way == 0
        before = [buffer.copy() for buffer in target.buffers]
        for buffer in source.buffers:
            buffer += 1
        time.sleep(0.02)
        assert not reader.poll([])
        assert all(np.array_equal(one, old) for one, old in zip(target.buffers, before, strict=True))
    last = room_of(slots_of(1), slots_of(2))
    read_all([(reader, last)])
    assert same(target, slots_of(1), source, slots_of(2))


@pytest.mark.parametrize("every", [2, 3])
def test_reads_that_fail_halfway_are_read_again(pools: Pools, every: int) -> None:
    """Every second or third read of the engine does: what is here in the end is right all the same."""
    source, target = pools.pair("inproc")
    reader = pools.reader(target, source, most_bytes=16 * sum(SLOT_BYTES))
    room, failures = room_of(slots_of(1), slots_of(2)), 0
    assert isinstance(target.engine, InprocTransfer)
    until = time.monotonic() + 30.0
    while room.here < room.length or room.stale:
        assert time.monotonic() < until
        target.engine.faults.fail_every = every if failures < 5 else 0
        reader.begin([room])
        failures += len(reader.poll([room]))
    assert failures == 5
    assert same(target, slots_of(1), source, slots_of(2))
