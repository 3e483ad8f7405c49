"""SplitPrefill: a prefill that runs some layers per step, with decodes in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.step import Launched
from pegboard.core.pipeline.sources import BatchSource
from pegboard.core.pipeline.step import Step

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import PrefillItem
    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.pipeline.planner import Planner
    from pegboard.core.pipeline.recovery import Recovery


class SplitPrefill(BatchSource):
    """At most one prefill at a time, of `num_layers` layers, `layers` per part. It takes those beside which there is
    something to decode.
    """

    def __init__(
        self,
        planner: Planner,
        recovery: Recovery,
        commit: Callable[[Step, BatchResult], None],
        layers: int,
        num_layers: int,
    ) -> None:
        super().__init__(planner, recovery, commit)
        self._whole: Step | None = None
        self._open: set[int] = set()
        self._done = 0
        self._layers = layers
        self._num_layers = num_layers

    @property
    def under_way(self) -> Step | None:
        return self._whole

    def takes(self, items: Sequence[PrefillItem]) -> bool:
        return bool(self._planner.running)

    def begin(self, step: Step) -> Step:
        step.source = self
        self._whole, self._done = step, 0
        self._open.add(step.number)
        return self._part(step)

    def next(self, flight: Launched | None) -> Step | None:
        return None if self._whole is None else self._part(self._whole)

    def _part(self, whole: Step) -> Step:
        """Return the next layers of the prefill; its requests join the running batch with the last."""
        done, self._done = self._done, self._done + self._layers
        last = self._done >= self._num_layers
        part = self._planner.builder.split(whole, self._layers, first=done == 0, last=last)
        part.source = self
        if last:
            self._end(whole)
        return part

    def _end(self, whole: Step) -> None:
        """No more parts of this prefill: its requests are running ones from now on."""
        if self._whole is whole:
            self._whole = None
            self._planner.builder.join(whole, self._planner.running)

    def settle(self, step: Step, result: BatchResult) -> None:
        if step.final:
            super().settle(step, result)

    def failed(self, step: Step, error: Exception) -> None:
        # All of it is computed again, in one go.
        whole = step.whole or step
        self._end(whole)
        super().failed(whole, error)

    def undo(self, step: Step) -> None:
        whole = step.whole or step
        if self._whole is whole:
            self._whole = None
        super().undo(whole)

    def _close(self, step: Step) -> None:
        if step.number in self._open:  # a part of one that was undone may fail yet
            self._open.remove(step.number)
            super()._close(step)

    def behind_failed(self, step: Step, failed: Launched, own_error: Exception | None) -> None:
        """Undo it where its first layers failed too, or have read what the failed step was to compute."""
        before = failed if isinstance(failed, Step) else None
        if before is not None and before.batch is step.batch:
            return  # the part before it failed: all of it has been computed again
        if (
            step.final
            or own_error is not None
            or before is None
            or any(req.rid in before.batch.partial for req in step.reqs)
        ):
            self.undo(step)
