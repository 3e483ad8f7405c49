"""Ranks and sections as threads of one process, which report a call that is missing, or that is another on another
rank.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from pegboard.toolkit.model.ranks import Ranks
from pegboard.toolkit.model.sections import Sections

R = TypeVar("R")
SECONDS = 20.0


class _Meeting:
    """What all ranks give to one call after the other."""

    def __init__(self, size: int) -> None:
        self.given: list[tuple[str, Tensor]] = [("", torch.empty(0))] * size
        self.barrier = threading.Barrier(size, timeout=SECONDS)

    def meet(self, index: int, call: str, x: Tensor, *, copied: bool = True) -> list[Tensor]:
        """Return what each rank has given: copies, unless `copied` is False. Raises AssertionError where their calls
        differ.
        """
        self.given[index] = (call, x)
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise AssertionError(
                f"rank {index} waits in {call} {list(x.shape)}, and another rank does not come"
            ) from None
        calls = [f"{name} {list(given.shape)} {given.dtype}" for name, given in self.given]
        found = [given.clone() if copied else given for _, given in self.given]
        self.barrier.wait()
        assert len(set(calls)) == 1, f"ranks call different things: {calls}"
        return found


class ThreadCollectives:
    """`Collectives` of one rank."""

    def __init__(self, meeting: _Meeting, index: int) -> None:
        self._meeting = meeting
        self._index = index

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._meeting.meet(self._index, "all_reduce", x)).sum(0)

    def gather(self, x: Tensor) -> Tensor | None:
        found = self._meeting.meet(self._index, "gather", x)
        return None if self._index else torch.cat(found, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        return self._meeting.meet(self._index, "broadcast", x)[0]

    @property
    def shares_memory(self) -> bool:
        return True

    def region(self, nbytes: int) -> Tensor:
        """Return memory of this process, which is that of the first rank."""
        return self._meeting.meet(self._index, "region", torch.zeros(nbytes, dtype=torch.uint8), copied=False)[0]

    def check_others(self, waited: float) -> None:
        if self._meeting.barrier.broken:
            raise AssertionError(f"rank {self._index} waits in native code, and another rank has failed")
        if waited > SECONDS:
            raise AssertionError(f"rank {self._index} waits in native code, and another rank does not come")


def on_ranks(size: int, does: Callable[[Ranks], R]) -> list[R]:
    """Return what each rank returns, all at once. Raises what one of them raises."""
    meeting = _Meeting(size)

    def one(index: int) -> R:
        ranks = Ranks(size, index)
        ranks.connect(ThreadCollectives(meeting, index))
        try:
            return does(ranks)
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def lonely(size: int) -> Ranks:
    """Return rank 0 of `size`; the others never come."""
    ranks = Ranks(size)
    ranks.connect(ThreadCollectives(_Meeting(size), 0))
    return ranks


class ThreadChannels:
    """`Channels` of one section: `sent` has what is on its way, by its source and where it goes."""

    def __init__(self, sent: Mapping[tuple[int, int], queue.Queue[Tensor]], index: int) -> None:
        self._sent = sent
        self._index = index

    def send(self, x: Tensor, to: int) -> None:
        self._sent[self._index, to].put(x.clone())

    def receive(self, x: Tensor, source: int) -> Tensor:
        try:
            found = self._sent[source, self._index].get(timeout=SECONDS)
        except queue.Empty:
            raise AssertionError(f"section {self._index} waits for section {source}, which sends nothing") from None
        assert (found.shape, found.dtype) == (x.shape, x.dtype), (
            f"section {source} sends {list(found.shape)} {found.dtype}, "
            f"and section {self._index} waits for {list(x.shape)} {x.dtype}"
        )
        return x.copy_(found)


def on_sections(count: int, does: Callable[[Ranks], R], layers: Sequence[int] = ()) -> list[R]:
    """Return what each section returns, all at once, of one rank each. Raises what one of them raises, and
    AssertionError for what is sent and not received.
    """
    sent = {(source, to): queue.Queue[Tensor]() for source in range(count) for to in range(count)}

    def one(index: int) -> R:
        ranks = Ranks(sections=Sections(count, index, layers))
        ranks.sections.connect(ThreadChannels(sent, index))
        return does(ranks)

    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(one, range(count)))
    for (source, to), left in sent.items():
        assert left.empty(), f"section {source} sends more than section {to} receives"
    return found
