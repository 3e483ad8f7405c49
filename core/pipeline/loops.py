"""Loops: how steps follow each other. The components are the scheduler's; a loop only decides what waits for what."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pegboard.core.interfaces.step import BaseStep


class Driven(Protocol):
    """What a loop drives: the scheduler."""

    def launch(self, in_flight: BaseStep | None) -> BaseStep | None: ...

    def settle(self, step: BaseStep, behind: BaseStep | None = None) -> bool: ...


class Loop(abc.ABC):
    """One turn is one new step at most. `in_flight` is the step that is under way between two turns."""

    def __init__(self, scheduler: Driven) -> None:
        self._scheduler = scheduler
        self.in_flight: BaseStep | None = None

    @abc.abstractmethod
    def turn(self) -> None: ...


class NormalLoop(Loop):
    """Plan, run, take the results."""

    def turn(self) -> None:
        step = self._scheduler.launch(None)
        if step is not None:
            self._scheduler.settle(step)


class OverlapLoop(Loop):
    """Plan and launch the next step, then take the results of the one before, which the device has been computing.

    What the plan must not do before it knows those results (retract, preempt, give a processor its history) it
    leaves; the loop then settles first and plans again. A request that turns out to have ended is in one step too many,
    whose token is dropped.
    """

    def turn(self) -> None:
        scheduler, before = self._scheduler, self.in_flight
        after = scheduler.launch(before)
        if after is None and before is not None:
            self.in_flight = None
            scheduler.settle(before)
            before, after = None, scheduler.launch(None)
        self.in_flight = after
        if before is not None and not scheduler.settle(before, behind=after):
            self.in_flight = None
