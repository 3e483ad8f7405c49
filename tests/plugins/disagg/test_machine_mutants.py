"""What the state machine must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.core.interfaces.admission_gate import AdmissionGate, Seat, Verdict
from pegboard.core.interfaces.kv_transfer import TransferNews, TransferState
from pegboard.core.interfaces.req import Req
from pegboard.plugins.disagg.events import Said
from pegboard.plugins.disagg.gate import DisaggGate
from pegboard.plugins.disagg.messages import AboutRooms, Gone, Kept, Ready, Taken
from tests.plugins.disagg.servers import Broken
from tests.plugins.disagg.walk import ACTS, CALM, failures, walk
from tests.plugins.disagg.wire import End, VirtualTransfer
from tests.plugins.disagg.world import Setup


class Around(AdmissionGate):
    """A gate that does what another one does."""

    def __init__(self, inner: DisaggGate) -> None:
        super().__init__(inner.options, inner.ctx)
        self.inner = inner

    def concerns(self, req: Req) -> bool:
        return self.inner.concerns(req)

    def enter(self, req: Req) -> Verdict:
        return self.inner.enter(req)

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        return self.inner.poll(blocked)

    def seated(self, req: Req, seat: Seat) -> None:
        self.inner.seated(req, seat)

    def computed(self, req: Req, slots: NDArray[np.int32]) -> None:
        self.inner.computed(req, slots)

    def cancel(self, req: Req) -> bool | None:
        return self.inner.cancel(req)

    def finished(self, req: Req) -> bool:
        return self.inner.finished(req)

    def released(self) -> Iterable[str]:
        return self.inner.released()

    def drop(self, req: Req) -> None:
        self.inner.drop(req)


class NoQuarantine(Around):
    def cancel(self, req: Req) -> bool | None:
        self.inner.cancel(req)
        return None


class QuarantinesForEver(Around):
    def released(self) -> Iterable[str]:
        self.inner.released()
        return ()


class ReadsWhatIsCached(Around):
    def seated(self, req: Req, seat: Seat) -> None:
        self.inner.seated(req, Seat(seat.slots, 0, seat.length))


class HoldsNothing(Around):
    def finished(self, req: Req) -> bool:
        self.inner.finished(req)
        return False


class HoldsForEver(Around):
    def released(self) -> Iterable[str]:
        self.inner.released()
        return ()


class IgnoresRetraction(Around):
    def computed(self, req: Req, slots: NDArray[np.int32]) -> None:
        if slots.shape[0]:
            self.inner.computed(req, slots)


class GoneAtOnce(VirtualTransfer):
    """Calls a read gone that still writes."""

    def abandon(self, handle: int) -> None:
        if handle in self.reads and not self.reads[handle].abandoned:
            super().abandon(handle)
            self.news.append(TransferNews(handle, TransferState.GONE))


def no_kept(end: End) -> None:
    """Believe what was read, without asking."""

    def change(message: AboutRooms) -> Sequence[AboutRooms]:
        if isinstance(message, Taken):
            kept = Kept(message.room, message.index, message.attempt, message.epoch, message.upto)
            link = next(wire.link for wire in end.net.wires if wire.decode is end)
            end.inbox.append(Said(link, kept))
        return [message]

    end.change = change


def no_epoch(end: End) -> None:
    """Say nothing of retractions: on prefill, what is taken is of the epoch that there is."""
    now: dict[int, int] = {}

    def change(message: AboutRooms) -> Sequence[AboutRooms]:
        if isinstance(message, Ready):
            now[message.room] = message.epoch
        if isinstance(message, Ready | Kept):
            return [_with(message, epoch=0)]
        return [] if isinstance(message, Gone) else [message]

    def hear(message: AboutRooms) -> AboutRooms:
        return _with(message, epoch=now.get(message.room, 0)) if isinstance(message, Taken) else message

    end.change, end.hear = change, hear


def one_attempt(end: End) -> None:
    end.change = lambda message: [_with(message, attempt=1)]


def kept_for_gone(end: End) -> None:
    def change(message: AboutRooms) -> Sequence[AboutRooms]:
        if isinstance(message, Gone):
            return [Kept(message.room, message.index, message.attempt, message.epoch, 10**6)]
        return [message]

    end.change = change


def _with(message: AboutRooms, **fields: int) -> AboutRooms:
    return msgspec.structs.replace(message, **fields)


MUTANTS: dict[str, Callable[[], Broken]] = {
    "no kept": lambda: Broken(decode_end=no_kept),
    "no quarantine": lambda: Broken(decode=NoQuarantine),
    "a quarantine for ever": lambda: Broken(decode=QuarantinesForEver),
    "no epoch": lambda: Broken(prefill_end=no_epoch),
    "kept for gone": lambda: Broken(prefill_end=kept_for_gone),
    "reads what is cached": lambda: Broken(decode=ReadsWhatIsCached),
    "holds nothing": lambda: Broken(prefill=HoldsNothing),
    "holds for ever": lambda: Broken(prefill=HoldsForEver),
    "ignores retraction": lambda: Broken(prefill=IgnoresRetraction),
    "gone at once": lambda: Broken(transfer=GoneAtOnce),
}


def walks(broken: Callable[[], Broken], setup: Setup | None = None) -> None:
    """Where the network works well, more is computed, retracted and read; the rest is found where it does not."""
    for seed in range(40):
        for weighted in (CALM, ACTS):
            walk(seed, 500, setup, broken=broken(), weighted=weighted)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_caught(mutant: str) -> None:
    with pytest.raises((AssertionError, ValueError, KeyError)):
        walks(MUTANTS[mutant])


def test_one_attempt_is_caught() -> None:
    """What is late would fail others."""
    broken = Broken(decode_end=one_attempt, prefill_end=one_attempt)
    failed = [one for seed in range(10) for one in failures(walk(seed, 500, broken=broken, weighted=CALM))]
    assert failed


def test_nothing_else_is_caught() -> None:
    """The same without a bug passes."""
    walk(0, 500, broken=Broken(prefill=Around, decode=Around))
