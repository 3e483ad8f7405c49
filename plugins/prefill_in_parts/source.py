"""SplitPrefill: a prefill that runs some layers per step, with decodes in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.batch_result import BatchResult
from pegboard.core.interfaces.step import BaseStep, BatchStep, StepSource

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import PrefillItem
    from pegboard.core.interfaces.step import CoreServices


class SplitPrefill(StepSource[BatchStep, BatchResult]):
    """At most one prefill at a time, of `num_layers` layers, `layers` per part. It takes those beside which there is
    something to decode.
    """

    first = True

    def __init__(self, core: CoreServices, layers: int, num_layers: int) -> None:
        self._core = core
        self._whole: BatchStep | None = None
        self._open: set[int] = set()
        self._done = 0
        self._layers = layers
        self._num_layers = num_layers

    @property
    def under_way(self) -> BatchStep | None:
        return self._whole

    def takes(self, items: Sequence[PrefillItem]) -> bool:
        return self._core.decoding

    def begin(self, step: BatchStep) -> BatchStep:
        step.source = self
        self._whole, self._done = step, 0
        self._open.add(step.number)
        return self._part(step)

    def next(self, in_flight: BaseStep | None) -> BatchStep | None:
        return None if self._whole is None else self._part(self._whole)

    def _part(self, whole: BatchStep) -> BatchStep:
        """Return the next layers of the prefill; its requests join the running batch with the last."""
        done, self._done = self._done, self._done + self._layers
        last = self._done >= self._num_layers
        part = self._core.split(whole, self._layers, first=done == 0, last=last)
        part.source = self
        if last:
            self._end(whole)
        return part

    def _end(self, whole: BatchStep) -> None:
        """No more parts of this prefill: its requests are running ones from now on."""
        if self._whole is whole:
            self._whole = None
            self._core.join(whole)

    def process_result(self, step: BatchStep, result: BatchResult) -> None:
        if step.final:
            self._core.commit(step, result)
            self._close(step)

    def failed(self, step: BatchStep, error: Exception) -> None:
        # All of it is computed again, in one go.
        whole = step.whole or step
        self._end(whole)
        self._core.halve(whole, error)
        self._close(whole)

    def undo(self, step: BatchStep) -> None:
        whole = step.whole or step
        if self._whole is whole:
            self._whole = None
        self._core.rewind(whole)
        self._close(whole)

    def _close(self, step: BatchStep) -> None:
        if step.number in self._open:  # a part of one that was undone may fail yet
            self._open.remove(step.number)
            self._core.closed(step)

    def behind_failed(self, step: BatchStep, failed: BaseStep, own_error: Exception | None) -> None:
        """Undo it where its first layers failed too, or have read what the failed step was to compute."""
        before = failed if isinstance(failed, BatchStep) else None
        if before is not None and before.batch is step.batch:
            return  # the part before it failed: all of it has been computed again
        if (
            step.final
            or own_error is not None
            or before is None
            or any(req.rid in before.batch.partial for req in step.reqs)
        ):
            self.undo(step)
