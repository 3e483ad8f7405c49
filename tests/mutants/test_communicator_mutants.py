"""Broken communicators, and the tests of the suite that notice."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import pytest
import torch

from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.core.interfaces.errors import PegboardError
from pegboard.plugins.parallel.gloo import Gloo
from pegboard.plugins.parallel.shm import Shm
from pegboard.plugins.parallel.suite import communicator
from pegboard.plugins.parallel.suite.communicator import CommunicatorContract


class CountsItselfTwice(Gloo):
    def all_reduce(self, x):
        return super().all_reduce(x.clone()) + x


class RoundsForItself(Gloo):
    def all_reduce(self, x):
        return super().all_reduce(x) * (1 + 1e-7 * self.ctx.index)


class TakesMemoryAsItLies(Gloo):
    def all_reduce(self, x):
        return super().all_reduce(x) if x.is_contiguous() else x


class GathersBackwards(Gloo):
    def gather(self, x):
        found = super().gather(x)
        return None if found is None else torch.cat(found.chunk(self.ctx.size, dim=-1)[::-1], dim=-1)


class GathersForAll(Gloo):
    def gather(self, x):
        found = super().gather(x)
        return x if found is None else found


class TellsInFloats(Gloo):
    def broadcast(self, x):
        return super().broadcast(x.float()).long() + 0


class KeepsItsOwn(Gloo):
    def broadcast(self, x):
        super().broadcast(x.clone())
        return x


class SendsFloats(Gloo):
    def send(self, x, to):
        super().send(x.float(), to)

    def receive(self, x, source):
        return super().receive(x.float(), source).to(x.dtype)


class SendsMemoryAsItLies(Gloo):
    def send(self, x, to):
        super().send(torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset()), to)


class SendsToAll(Gloo):
    """Each rank has one queue for what comes from any other."""

    def receive(self, x, source):
        return super().receive(x, (self.ctx.index - 1) % self.ctx.size)


class FillsAnotherTensor(Gloo):
    def receive(self, x, source):
        super().receive(x.clone(), source)
        return x


class SendsLater(Shm):
    """Sends what a tensor has become meanwhile."""

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self._later = ThreadPoolExecutor(1)

    def send(self, x, to):
        def sends():
            time.sleep(0.002)
            super(SendsLater, self).send(x, to)

        self._later.submit(sends)


class OverwritesWhatIsNotRead(Shm):
    """Does not look whether there is room in the ring."""

    _sends = False

    def send(self, x, to):
        self._sends = True
        super().send(x, to)
        self._sends = False

    def _wait_for(self, *what):
        if not self._sends:
            super()._wait_for(*what)


class ReadsWhatIsNotSent(Shm):
    _receives = 0

    def receive(self, x, source):
        self._receives = 1
        found = super().receive(x, source)
        self._receives = 0
        return found

    def _wait_for(self, place, count, *who):
        super()._wait_for(place, count - self._receives, *who)


class DoesOneThingAtATime(Shm):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self._lock = Lock()

    def send(self, x, to):
        assert self._lock.acquire(timeout=0.2), "another thread receives"
        super().send(x, to)
        self._lock.release()

    def receive(self, x, source):
        with self._lock:
            return super().receive(x, source)


class WaitsForWhatNeverComes(Gloo):
    def receive(self, x, source):
        try:
            return super().receive(x, source)
        except Exception:
            return x


class ForgetsEverySecond(Gloo):
    _calls = 0

    def all_reduce(self, x):
        self._calls += 1
        return super().all_reduce(x) if self._calls % 7 else x


class WaitsForGood(Gloo):
    def connect(self, meeting, timeout):
        try:
            super().connect(meeting, timeout)
        except Exception:
            return


class ClosesOnce(Gloo):
    _closed = False

    def close(self):
        assert not self._closed
        self._closed = True
        super().close()


class GoesOnWithoutMachines(Gloo):
    def connect_machines(self, meeting, timeout):
        with contextlib.suppress(PegboardError):
            super().connect_machines(meeting, timeout)


class ClosesItsCallers(Gloo):
    def connect_machines(self, meeting, timeout):
        super().connect_machines(meeting, timeout)
        if meeting.listener is not None:
            meeting.listener.close()


class KnowsMachines(Shm):
    def connect_machines(self, meeting, timeout):
        pass


class WaitsForNobody(Shm):
    """Writes into a slot that others may still read."""

    def _begin(self):
        self._calls += 1
        return self._calls % 2


class HasOneSlot(Shm):
    def _begin(self):
        return super()._begin() * 0


class ReadsTooEarly(Shm):
    def _wait(self, counters, calls):
        super()._wait(counters, calls - (calls == self._calls > 1))


class CutsWhatIsLarge(Shm):
    def all_reduce(self, x):
        head = x.contiguous().view(-1)[:65536]
        return super().all_reduce(head).view(x.shape) if head.numel() == x.numel() else x


class AddsItsOwnFirst(Shm):
    """Sums in another order on each rank."""

    def all_reduce(self, x):
        parts = [super(AddsItsOwnFirst, self).all_reduce(x * (rank == self.ctx.index)) for rank in range(self.ctx.size)]
        first = parts.pop(self.ctx.index)
        return sum(parts, first)


class GoesOnAlone(Shm):
    def all_reduce(self, x):
        with contextlib.suppress(RuntimeError):
            return super().all_reduce(x)
        return x


class HasItsOwnRegion(Shm):
    def region(self, nbytes):
        super().region(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)


class GivesOutOneRegion(Shm):
    _made = None

    def region(self, nbytes):
        if self._made is None:
            self._made = super().region(nbytes)
        return self._made[:nbytes]


class TakesItsRegionsAlong(Shm):
    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self._made = []

    def region(self, nbytes):
        self._made.append(super().region(nbytes))
        return self._made[-1]

    def close(self):
        for region in self._made:
            region.zero_()
        super().close()


class LooksAway(Shm):
    def check_others(self, waited):
        if waited > self._timeout:
            raise TimeoutError


class IsPatient(Shm):
    def check_others(self, waited):
        super().check_others(0.0)


class IsImpatient(Shm):
    def check_others(self, waited):
        super().check_others(100 * waited)


class SharesNothing(Gloo):
    def region(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)


REGION = "test_a_region_is_the_memory_of_all_ranks"
CAUGHT = {
    HasItsOwnRegion: REGION,
    GivesOutOneRegion: REGION,
    TakesItsRegionsAlong: REGION,
    LooksAway: "test_looking_after_the_others",
    IsPatient: "test_looking_after_the_others",
    IsImpatient: "test_looking_after_the_others",
    SharesNothing: "test_it_says_that_it_shares_no_memory",
    WaitsForNobody: "test_ranks_of_different_pace",
    HasOneSlot: "test_ranks_of_different_pace",
    ReadsTooEarly: "test_all_reduce_sums",
    CutsWhatIsLarge: "test_large_tensors",
    AddsItsOwnFirst: "test_all_ranks_hold_the_same_bits",
    GoesOnAlone: "test_a_rank_that_leaves_is_noticed",
    SendsFloats: "test_what_is_sent_arrives",
    SendsMemoryAsItLies: "test_tensors_with_gaps_between_their_rows",
    SendsToAll: "test_what_is_sent_arrives",
    FillsAnotherTensor: "test_what_is_sent_arrives",
    SendsLater: "test_what_is_sent_keeps_its_order",
    OverwritesWhatIsNotRead: "test_large_tensors",
    ReadsWhatIsNotSent: "test_what_is_sent_keeps_its_order",
    DoesOneThingAtATime: "test_receiving_beside_sending",
    WaitsForWhatNeverComes: "test_a_rank_that_leaves_is_noticed",
    CountsItselfTwice: "test_all_reduce_sums",
    RoundsForItself: "test_all_ranks_hold_the_same_bits",
    TakesMemoryAsItLies: "test_tensors_with_gaps_between_their_rows",
    GathersBackwards: "test_gather_is_for_rank_0",
    GathersForAll: "test_gather_is_for_rank_0",
    TellsInFloats: "test_broadcast_brings_what_rank_0_has",
    KeepsItsOwn: "test_broadcast_brings_what_rank_0_has",
    ForgetsEverySecond: "test_calls_follow_each_other",
    WaitsForGood: "test_ranks_that_do_not_come",
    ClosesOnce: "test_close_may_be_called_again",
    GoesOnWithoutMachines: "test_machines_that_do_not_come",
    ClosesItsCallers: "test_ranks_on_several_machines",
    KnowsMachines: "test_it_says_that_it_knows_no_other_machines",
}
WAITING = (SendsToAll, DoesOneThingAtATime)
"""What they wait for never comes, so the suite's patience is waited out, and twice by some."""
MUTANTS = [Mutant(cls, suite=CommunicatorContract, caught_by=test) for cls, test in CAUGHT.items()]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant.factory in WAITING:
        monkeypatch.setattr(communicator, "SECONDS", 4.0)
    assert_caught(mutant)
