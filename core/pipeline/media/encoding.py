"""Encoding: the planner's part that is about media. Prefills say what they lack, and steps of their own encode it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.pipeline.step import EncodeStep

if TYPE_CHECKING:
    from pegboard.core.pipeline.admission import PrefillAdder
    from pegboard.core.pipeline.batch import BatchBuilder
    from pegboard.core.pipeline.counters import Counters
    from pegboard.core.pipeline.media.books import EncoderBooks, EncodeWishes
    from pegboard.core.pipeline.step import Step


class Encoding:
    """Plans steps that encode media. Without `books` the model has none, and nothing happens here.

    `must_settle` says that what is lacking fits only once the step under way is settled, `was_last` that no prefill has
    been tried since the last step that encodes.
    """

    def __init__(self, books: EncoderBooks | None, builder: BatchBuilder, counters: Counters) -> None:
        self.books = books
        self.must_settle = False
        self.was_last = False
        self._builder = builder
        self._counters = counters
        self._wishes: EncodeWishes | None = None

    def begin(self, adder: PrefillAdder | None) -> None:
        """Note who collects the prefill that is being planned; None: there is nothing to prefill."""
        self._wishes = None if adder is None else adder.wishes
        self.must_settle = self.was_last = False

    def plan(self) -> EncodeStep | None:
        """Plan a step that encodes what the last prefill lacked, if that could not be planned; None where it lacked
        nothing, or nothing that fits now.
        """
        wishes = self._wishes
        if wishes is None:
            return None
        if not wishes.pieces:
            self.must_settle = wishes.blocked
            return None
        self._counters.encode_steps += 1
        self.was_last = True
        owners = tuple(tuple(reqs) for reqs in wishes.owners.values())
        return EncodeStep(self._builder.next_number(), wishes.plan(), owners)

    def hold(self, step: Step, adder: PrefillAdder) -> None:
        """Keep what a prefill reads until `release`."""
        if self.books is not None:
            self.books.hold(step.number, adder.pieces)

    def release(self, step: Step) -> None:
        """Note that a step is through, or will never run."""
        self._builder.points.closed(step)
        if self.books is not None:
            self.books.release(step.number)
