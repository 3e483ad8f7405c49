"""What the state machine must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.core.interfaces.req import Req
from pegboard.plugins.disagg.events import Said
from pegboard.plugins.disagg.gate import DisaggGate
from pegboard.plugins.disagg.messages import AboutRooms, Gone, Kept, Ready, Taken
from pegboard.plugins.kv_handoff.api import KVReservation
from pegboard.plugins.kv_handoff.api.transfer import TransferNews, TransferState
from tests.plugins.disagg.servers import Broken
from tests.plugins.disagg.walk import ACTS, CALM, failures, walk
from tests.plugins.disagg.wire import End, VirtualTransfer
from tests.plugins.disagg.world import Setup


class NoQuarantine(DisaggGate):
    def forget(self, req: Req) -> bool | None:
        super().forget(req)
        return None


class QuarantinesForEver(DisaggGate):
    def released(self) -> Iterable[str]:
        super().released()
        return ()


class ReadsWhatIsCached(DisaggGate):
    def reserved(self, req: Req, reservation: KVReservation) -> None:
        super().reserved(req, KVReservation(reservation.slots, 0, reservation.length))


class HoldsNothing(DisaggGate):
    def finished(self, req: Req) -> bool:
        super().finished(req)
        return False


class HoldsForEver(DisaggGate):
    def released(self) -> Iterable[str]:
        super().released()
        return ()


class IgnoresRetraction(DisaggGate):
    def computed(self, req: Req, slots: NDArray[np.int32]) -> None:
        if slots.shape[0]:
            super().computed(req, slots)


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
    walk(0, 500, broken=Broken())
