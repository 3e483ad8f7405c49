"""Broken engines that read KV, and the tests of the suite that notice."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np
import pytest

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.plugins.kv_handoff.api.transfer import Ranges, TransferError, TransferNews, TransferState
from pegboard.plugins.kv_handoff.suite import KVTransferContract
from pegboard.plugins.transfer_inproc.transfer import InprocTransfer


class Suite(KVTransferContract):
    provider = "inproc"
    patience = 1.0


def some(ranges, index):
    return Ranges(ranges.region[index], ranges.offset[index], ranges.nbytes[index])


class LosesTheLastByte(InprocTransfer):
    def _end(self, one, state, reason=""):
        piece = one.target.ranges
        if state is TransferState.DONE and len(piece):
            self.memory.views[piece.region[-1]][int(piece.offset[-1] + piece.nbytes[-1]) - 1] ^= 1
        super()._end(one, state, reason)


class WritesAround(InprocTransfer):
    def _end(self, one, state, reason=""):
        piece = one.target.ranges
        at = int(piece.offset[-1] + piece.nbytes[-1]) if len(piece) else 0
        if at < len(self.memory.views[0]):
            self.memory.views[piece.region[-1]][at] ^= 1
        super()._end(one, state, reason)


class NoSingleBytes(InprocTransfer):
    """Leaves out pieces of one byte, which no slot has."""

    def _made(self, handle, peer, lease, source, target):
        if np.array_equal(source.nbytes, target.nbytes):
            keep = source.nbytes > 1
            source, target = some(source, keep), some(target, keep)
        return super()._made(handle, peer, lease, source, target)


class OnlySoManyPieces(InprocTransfer):
    def _made(self, handle, peer, lease, source, target):
        if len(source) == len(target):
            source, target = some(source, slice(4096)), some(target, slice(4096))
        return super()._made(handle, peer, lease, source, target)


class SortsPieces(InprocTransfer):
    def _made(self, handle, peer, lease, source, target):
        return super()._made(handle, peer, lease, some(source, np.lexsort((source.offset, source.region))), target)


class ReadsOnce(InprocTransfer):
    """Large reads end after what is moved at a time."""

    def _made(self, handle, peer, lease, source, target):
        made = super()._made(handle, peer, lease, source, target)
        return dataclasses.replace(made, stops_at=min(made.stops_at, 4 * 2**20))

    def _judge(self, one, now):
        if one.at == one.stops_at:
            self._end(one, TransferState.DONE)
        else:
            super()._judge(one, now)


class RefusesNothing(InprocTransfer):
    def read(self, peer, lease, source, target):
        if not len(source):
            raise ValueError("nothing to read")
        return super().read(peer, lease, source, target)


class TakesPeersForAlike(InprocTransfer):
    """Looks at its own regions to see whether the peer's are long enough."""

    def _made(self, handle, peer, lease, source, target):
        made = super()._made(handle, peer, lease, source, target)
        own = self.memory.sizes[np.minimum(source.region, len(self.memory.sizes) - 1)]
        return made if (source.offset < own).all() else dataclasses.replace(made, wrong="too long")


class TellsHandlesOfOthers(InprocTransfer):
    """The reads of one poll are told under each other's handles."""

    def poll(self):
        news = list(super().poll())
        return [TransferNews(news[0].handle, one.state, one.reason) for one in news] if len(news) > 1 else news


class FirstPeerOnly(InprocTransfer):
    def read(self, peer, lease, source, target):
        self._peers = {name: next(iter(self._peers.values())) for name in self._peers}
        return super().read(peer, lease, source, target)


class OneReaderOnly(InprocTransfer):
    readers: set[int] = set()

    def read(self, peer, lease, source, target):
        self.readers.add(id(self))
        handle = super().read(peer, lease, source, target)
        if len(self.readers) > 1:
            self._reads[handle].source = None
        return handle

    def close(self):
        self.readers.discard(id(self))
        super().close()


class CountsAnew(InprocTransfer):
    def disconnect(self, peer):
        super().disconnect(peer)
        self._handles = 0


class TellsTwice(InprocTransfer):
    def abandon(self, handle):
        super().abandon(handle)
        if handle not in self._reads and 0 < handle <= self._handles:
            self._news.append(TransferNews(handle, TransferState.GONE))


class ClipsSources(InprocTransfer):
    """As indices are clipped where that is faster."""

    def _made(self, handle, peer, lease, source, target):
        region = np.clip(source.region, 0, len(self.memory.sizes) - 1).astype(np.int32)
        offset = np.clip(source.offset, 0, self.memory.sizes[region] - source.nbytes)
        return super()._made(handle, peer, lease, Ranges(region, offset, source.nbytes), target)


class TargetsFailLater(InprocTransfer):
    def read(self, peer, lease, source, target):
        try:
            return super().read(peer, lease, source, target)
        except ValueError as error:
            handle = super().read(peer, lease, some(source, slice(0)), some(target, slice(0)))
            self._end(self._reads[handle], TransferState.FAILED, str(error))
            return handle


class ReadsWhatFits(InprocTransfer):
    """As many bytes as both sides have."""

    def read(self, peer, lease, source, target):
        if source.total != target.total:
            source, target = some(source, slice(0)), some(target, slice(0))
        return super().read(peer, lease, source, target)


class UnknownPeersFail(InprocTransfer):
    def read(self, peer, lease, source, target):
        self._peers.setdefault(peer, b"")
        return super().read(peer, lease, source, target)


class BelievesDescriptions(InprocTransfer):
    def connect(self, peer, host, description):
        try:
            super().connect(peer, host, description)
        except TransferError:
            self._peers[peer] = bytes(description)


class LooksAtHalfTheToken(InprocTransfer):
    known: list[bytes] = []

    def describe(self):
        self.known.append(super().describe())
        return self.known[-1]

    def connect(self, peer, host, description):
        for right in self.known:
            if right[: len(right) // 2] == description[: len(right) // 2]:
                description = right
        super().connect(peer, host, description)


class WaitsForTheGone(InprocTransfer):
    def _end(self, one, state, reason=""):
        if "gone" not in reason:
            super()._end(one, state, reason)


class SaysDoneWhatIsNot(InprocTransfer):
    """A peer that goes has sent all, it believes."""

    def _end(self, one, state, reason=""):
        super()._end(one, TransferState.DONE if "gone" in reason and one.at else state, reason)


class KeepsTheFirst(InprocTransfer):
    def connect(self, peer, host, description):
        if peer not in self._peers:
            super().connect(peer, host, description)


class ForgetsReads(InprocTransfer):
    def disconnect(self, peer):
        super().disconnect(peer)
        self._reads = {handle: one for handle, one in self._reads.items() if one.peer != peer}


class GoneAtOnce(InprocTransfer):
    """Tells the end when it is asked for, and a thread is still copying."""

    def abandon(self, handle):
        one = self._reads.get(handle)
        super().abandon(handle)
        if one is not None:
            threading.Thread(target=self._write_on, args=(one,)).start()

    def _write_on(self, one):
        time.sleep(0.02)
        step = 2**18
        while one.at < one.pieces.total:
            self._copy(one, min(one.pieces.total, one.at + step))


class MindsUnknownHandles(InprocTransfer):
    def abandon(self, handle):
        self._reads[handle].abandoned = self.ctx.clock()


class ClosesLater(InprocTransfer):
    def close(self):
        reads = list(self._reads.values())
        threading.Thread(target=self._write_on, args=(reads,)).start()

    def _write_on(self, reads):
        time.sleep(0.01)
        for one in reads:
            self._copy(one, min(one.pieces.total, one.at + 2**18))
        super().close()


class Waits(InprocTransfer):
    def connect(self, peer, host, description):
        time.sleep(0.001)
        super().connect(peer, host, description)


class TellsTexts(InprocTransfer):
    def stats(self):
        return {"state": "fine"}


class NoLeases(InprocTransfer):
    def _made(self, handle, peer, lease, source, target):
        made = super()._made(handle, peer, lease, source, target)
        fence = object()
        if made.source is not None:
            made.source.leases[made.lease] = fence
        return dataclasses.replace(made, fence=fence)


class ShortLeases(InprocTransfer):
    def allow(self, lease):
        super().allow(lease & 0xFFFFFFFF)

    def _made(self, handle, peer, lease, source, target):
        return super()._made(handle, peer, lease & 0xFFFFFFFF, source, target)


class BeginsLeasesAnew(InprocTransfer):
    """Reads under way are of another lease then."""

    def allow(self, lease):
        self.revoke(lease)
        super().allow(lease)


class LooksAtTheLeaseOnce(InprocTransfer):
    def _refusal(self, one):
        return super()._refusal(one) if not one.at else ""


class LooksAtLeasesAnyway(InprocTransfer):
    """Without saying that it is fenced."""


class Unfenced(InprocTransfer):
    """Without the mistake."""

    def _refusal(self, one):
        why = super()._refusal(one)
        return "" if "lease" in why else why


CAUGHT = {
    LosesTheLastByte: "test_all_bytes_and_no_others",
    WritesAround: "test_all_bytes_and_no_others",
    NoSingleBytes: "test_any_pieces",
    OnlySoManyPieces: "test_many_pieces",
    SortsPieces: "test_sources_may_overlap",
    ReadsOnce: "test_large_reads",
    RefusesNothing: "test_nothing_is_read",
    TakesPeersForAlike: "test_regions_may_differ",
    TellsHandlesOfOthers: "test_reads_beside_each_other",
    FirstPeerOnly: "test_two_peers",
    OneReaderOnly: "test_two_readers",
    CountsAnew: "test_handles_are_not_given_again",
    TellsTwice: "test_each_end_is_told_once",
    ClipsSources: "test_a_source_beyond_the_regions_fails",
    TargetsFailLater: "test_a_target_beyond_the_regions_is_an_error",
    ReadsWhatFits: "test_other_numbers_of_bytes_are_an_error",
    UnknownPeersFail: "test_unknown_peers_are_an_error",
    BelievesDescriptions: "test_garbage_is_no_description",
    LooksAtHalfTheToken: "test_another_ones_description_gives_nothing",
    WaitsForTheGone: "test_a_peer_that_is_gone_fails",
    SaysDoneWhatIsNot: "test_a_peer_that_goes_amid_reads",
    KeepsTheFirst: "test_a_name_may_be_given_again",
    ForgetsReads: "test_a_forgotten_peers_reads_end",
    GoneAtOnce: "test_after_its_end_nothing_is_written",
    MindsUnknownHandles: "test_abandoning_what_is_not_there",
    ClosesLater: "test_closing_ends_everything",
    Waits: "test_no_call_waits",
    TellsTexts: "test_figures_are_plain",
    NoLeases: "test_only_leases_are_read_under",
    ShortLeases: "test_leases_are_numbers_of_any_kind",
    BeginsLeasesAnew: "test_a_lease_may_be_allowed_again",
    LooksAtTheLeaseOnce: "test_what_is_done_was_read_before_the_lease_ended",
}
MUTANTS = [Mutant(cls, suite=Suite, caught_by=test) for cls, test in CAUGHT.items()] + [
    Mutant(
        LooksAtLeasesAnyway,
        suite=Suite,
        caught_by="test_without_fences_leases_are_not_looked_at",
        base=Unfenced,
        provides=frozenset(),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant) -> None:
    assert_caught(mutant)
