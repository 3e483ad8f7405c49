"""Packing: what plugins bring along with each batch that runs, halves of a failed one included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.batch import BatchExtras
from pegboard.core.pipeline.executor import Done

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.executor import Pending
    from pegboard.core.pipeline.stages import Hook, Stages
    from pegboard.core.pipeline.step import Step


class Packing:
    """Hands steps to the executor with the `extras` of the hooks `pack_batch`. A hook takes part in the step here and
    does not only watch it, so it is not skipped where it raises: without what it brings, answers could be wrong.
    """

    def __init__(self, stages: Stages, hooks: tuple[Hook, ...] = ()) -> None:
        self._stages = stages
        self._hooks = hooks

    def submit(self, step: Step) -> Pending[object]:
        """Start a step. Never raises: what a hook or the forward pass raises, `Pending.result` does."""
        try:
            # The later parts of a split prefill are of the same batch, and share its extras.
            if step.work.part is None or step.work.part.first:
                self._pack(step)
        except Exception as error:
            return Done(None, error)
        return self._stages.executor.submit(step.work)

    def again(self, part: Step) -> BatchResult:
        """Run a part of a failed step at once. Raises what a hook or the forward pass raises."""
        self._pack(part)
        return self._stages.executor.again(part.work)

    def _pack(self, step: Step) -> None:
        if self._hooks:
            extras = BatchExtras(len(step.batch.reqs), step.work.input_ids.shape[0])
            for hook in self._hooks:
                hook(step.batch, extras)
            step.work.extras.update(extras.values)
