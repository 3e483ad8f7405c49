"""SplitPrefill: a prefill that runs some layers per step, with decodes in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.batch import BatchBuilder
    from pegboard.core.pipeline.running import RunningBatch
    from pegboard.core.pipeline.step import Step


class SplitPrefill:
    """At most one prefill at a time; `step` is the whole of it, None when there is none. It runs `layers` per part; 0:
    no prefill is split.
    """

    def __init__(self, builder: BatchBuilder, running: RunningBatch, layers: int, num_layers: int) -> None:
        self.step: Step | None = None
        self.layers = layers if layers < num_layers else 0
        self._num_layers = num_layers
        self._builder = builder
        self._running = running
        self._done = 0

    def begin(self, step: Step) -> Step:
        """Return the first part of a prefill."""
        self.step, self._done = step, 0
        return self.next_part(step)

    def next_part(self, step: Step) -> Step:
        """Return the next layers of the prefill that is under way; its requests join the running batch with the
        last.
        """
        done, self._done = self._done, self._done + self.layers
        last = self._done >= self._num_layers
        part = self._builder.split(step, self.layers, first=done == 0, last=last)
        if last:
            self.end(step)
        return part

    def end(self, step: Step) -> None:
        """No more parts of this prefill: its requests are running ones from now on."""
        if self.step is step:
            self.step = None
            self._builder.join(step, self._running)

    def take(self) -> Step | None:
        """Give up the prefill that is under way, and return it."""
        step, self.step = self.step, None
        return step

    def holds(self, req: Req) -> bool:
        """Return whether a request is in a prefill some of whose layers are still to come: its slots are being written
        to.
        """
        return self.step is not None and req in self.step.batch.reqs
