"""Copies within a process that are slow or go wrong, because a test wants that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from pegboard.plugins.kv_handoff.api.transfer import KVTransferContext, Region, TransferState
from pegboard.plugins.kv_handoff.suite.rig import LEASE, Server, ranges
from pegboard.plugins.transfer_inproc.options import InprocOptions
from pegboard.plugins.transfer_inproc.transfer import InprocTransfer

SIZE = 2**20
ALL = ranges([(0, 0, SIZE)])
DONE, FAILED, GONE = TransferState.DONE, TransferState.FAILED, TransferState.GONE


@dataclass
class Pair:
    """A source, a reader, and a clock that a test turns."""

    now: float = 0.0

    def __post_init__(self) -> None:
        self.engines: list[InprocTransfer] = []
        self.options = InprocOptions()

    def make(self, **options: object) -> Server:
        """Return a reader with these options that knows a source as "peer"."""
        self.source = self._server(InprocOptions())
        self.source.engine.allow(LEASE)
        reader = self._server(InprocOptions.model_validate(options))
        reader.connect(self.source)
        return reader

    def _server(self, options: InprocOptions) -> Server:
        def build(ctx: KVTransferContext) -> InprocTransfer:
            self.engines.append(InprocTransfer(options, KVTransferContext(ctx.regions, lambda: self.now)))
            return self.engines[-1]

        return Server([SIZE], build, seed=len(self.engines))

    @property
    def reader(self) -> InprocTransfer:
        return self.engines[-1]


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for one in pair.engines:
        one.close()


def state(server: Server, handle: int) -> TransferState | None:
    server.poll()
    return server.ended[handle].state if handle in server.ended else None


def test_a_delay(pair: Pair) -> None:
    reader = pair.make(delay=2.0)
    handle = reader.read(ALL, ALL)
    pair.now = 1.9
    assert state(reader, handle) is None
    assert not np.array_equal(reader.regions[0], pair.source.regions[0])
    pair.now = 2.0
    assert state(reader, handle) is DONE


def test_a_speed(pair: Pair) -> None:
    """However often it is polled."""
    reader = pair.make(bytes_per_second=float(SIZE))
    handle = reader.read(ALL, ALL)
    for step in range(100):
        assert state(reader, handle) is None, step
        pair.now = (step + 1) / 100
    same = reader.regions[0] == pair.source.regions[0]
    assert same[: SIZE * 98 // 100].all()
    assert not same[SIZE * 99 // 100 + 1 :].all()
    pair.now += 0.001
    assert state(reader, handle) is DONE


def test_only_so_many_bytes_at_a_time(pair: Pair) -> None:
    reader = pair.make(bytes_per_poll=SIZE // 4)
    handle = reader.read(ALL, ALL)
    assert [state(reader, handle) for _ in range(4)] == [None, None, None, DONE]


def test_some_fail_and_some_stop(pair: Pair) -> None:
    reader = pair.make(fail_every=2, stall_every=3)
    handles = [reader.read(ALL, ALL) for _ in range(4)]
    for _ in range(5):
        reader.poll()
    assert [state(reader, one) for one in handles] == [DONE, FAILED, None, FAILED]
    assert reader.ended[handles[1]].reason == "on demand"
    reader.engine.abandon(handles[2])
    assert state(reader, handles[2]) is GONE


def test_later_ones_end_first(pair: Pair) -> None:
    reader = pair.make(shuffle=True, bytes_per_poll=SIZE)
    handles = [reader.read(ALL, ALL) for _ in range(3)]
    for _ in range(3):
        reader.poll()
    assert list(reader.ended) == handles[::-1]


def test_what_is_abandoned_is_written_to_for_a_while(pair: Pair) -> None:
    reader = pair.make(linger=1.0, bytes_per_poll=SIZE // 4)
    handle = reader.read(ALL, ALL)
    reader.poll()
    reader.engine.abandon(handle)
    before = reader.copy()
    pair.now = 0.9
    assert state(reader, handle) is None
    assert not np.array_equal(before[0], reader.regions[0])
    pair.now = 1.0
    assert state(reader, handle) is GONE
    before = reader.copy()
    reader.poll()
    assert np.array_equal(before[0], reader.regions[0])


def test_faults_come_and_go(pair: Pair) -> None:
    reader = pair.make()
    pair.reader.faults.stalled = True
    handle = reader.read(ALL, ALL)
    assert state(reader, handle) is None
    pair.reader.faults.stalled = False
    assert state(reader, handle) is DONE
    pair.reader.faults.lost = True
    assert state(reader, reader.read(ALL, ALL)) is FAILED
    pair.reader.faults.lost = False
    assert state(reader, reader.read(ALL, ALL)) is DONE


def test_a_lease_of_the_same_number_is_another_one(pair: Pair) -> None:
    reader = pair.make(delay=1.0)
    handle = reader.read(ALL, ALL)
    pair.source.engine.revoke(LEASE)
    pair.source.engine.allow(LEASE)
    pair.now = 1.0
    assert state(reader, handle) is FAILED


def test_other_devices_are_not_supported() -> None:
    region = Region(4096, 4096, 16, 1, device="cuda:0")
    objection = InprocTransfer.supports(InprocOptions(), KVTransferContext((region,)))
    assert objection is not None
    assert "another device" in objection
