"""What the pipeline sees of ranks: a stage without a say, and what stands around each forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pegboard.core.interfaces.ahead import Wants
from pegboard.core.interfaces.stage import DevicePart, Stage

if TYPE_CHECKING:
    from pegboard.core.interfaces.forward import ForwardBatch

R = TypeVar("R")
NAME = "ranks"


@dataclass(frozen=True, slots=True)
class Stamp:
    """The payload: the `number` of a batch among all that were sent, and whether tokens are `sampled` after it."""

    number: int
    sampled: bool


class RanksStage(Stage):
    """The part belongs to it."""

    name = NAME


class RanksPart(DevicePart):
    """On rank 0 it watches that every batch that was sent is computed, too; on the others of the first section, which
    `follow` it and have a share of the head, it asks for the logits of those rows that rank 0 samples.
    """

    name = NAME
    payload = Stamp

    def __init__(self, *, follows: bool) -> None:
        self._follows = follows
        self.around: Callable[[int, Callable[[], object]], object] | None = None

    def wants(self, payload: object) -> Wants:
        assert isinstance(payload, Stamp)
        return Wants(logits=self._follows and payload.sampled)

    def execute(self, payload: object, batch: ForwardBatch, run: Callable[[], R]) -> R:
        assert isinstance(payload, Stamp)
        if self.around is None:
            return run()
        found: list[R] = []
        self.around(payload.number, lambda: found.append(run()))
        return found[0]
