"""Recovery: a step that raised is repaired by its source. A batch is run again in halves, until the request to blame is
alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.interfaces.step import StepLost
from pegboard.core.pipeline.executor import outcome
from pegboard.core.pipeline.step import Step
from pegboard.core.registry.blame import text_of

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.step import Launched
    from pegboard.core.pipeline.counters import Counters
    from pegboard.core.pipeline.lifecycle import Lifecycle
    from pegboard.core.pipeline.packing import Packing
    from pegboard.core.pipeline.planner import Planner
    from pegboard.core.pipeline.stages import Stages

logger = logging.getLogger(__name__)

MAX_SINGLE_FAILURES = 4
"""After so many requests of a step have failed alone and none has passed, the fault is not that of one: all fail."""


class DeviceFailed(RuntimeError):
    """The device does not come back. The process has to start anew."""


class Recovery:
    """Bisection of a failed step, allowed because nothing of it was committed: its KV goes to the same places again.
    `commit` gives a part's tokens to its requests.
    """

    def __init__(
        self,
        stages: Stages,
        planner: Planner,
        requests: Lifecycle,
        packing: Packing,
        counters: Counters,
        commit: Callable[[Step, BatchResult], None],
    ) -> None:
        self._stages = stages
        self._planner = planner
        self._requests = requests
        self._packing = packing
        self._counters = counters
        self._commit = commit
        self._passed = 0
        self._failed = 0

    def recover(self, step: Launched, error: Exception, behind: Launched | None) -> None:
        """Recover from a step that raised, and from `behind`, which was launched after it, if one was. What it computed
        is undefined, but nothing of it was committed.
        """
        self._not_sent(step)
        own_error = None
        if behind is not None:
            _, own_error = outcome(behind.pending)
            self._not_sent(behind)
        lost = isinstance(error, StepLost)
        if lost:
            self.note(step.number, f"{len(step.reqs)} requests", error)
            if isinstance(step, Step) and step.work.loads:
                self._stages.memory.load_failed()
        else:
            step.source.failed(step, error)
        # Only now: a request whose chunk failed may have its next one in the step after, and has to be tried first.
        if behind is not None:
            behind.source.behind_failed(behind, step, own_error)
        if lost:
            # No request is to blame: what it admitted waits again, and is loaded or computed then.
            step.source.undo(step)
        self._planner.running.rewind()

    def note(self, number: int, what: str, error: Exception) -> None:
        """Count and log a failure of `what`, which is all or a part of the step with this number."""
        self._counters.failed_batches += 1
        culprit = self._stages.culprits.of(error)
        self._stages.culprits.count(culprit)
        plain = str(error) if isinstance(error, StepLost) else "the model failed"
        accused = plain if culprit is None else culprit.accuse(error)
        logger.error("batch %d of %s: %s", number, what, accused, exc_info=error)

    def halve(self, step: Step, error: Exception) -> None:
        """Run a failed step again in halves, until the requests at fault are alone; they end with status 500.

        Nothing else may be under way. Raises DeviceFailed where another forward pass has no chance.
        """
        self.note(step.number, f"{len(step.batch)} requests", error)
        self._passed = self._failed = 0
        self._halve(step, 0, len(step.reqs), error)

    def _halve(self, step: Step, start: int, stop: int, error: Exception) -> None:
        """Find the requests at fault among those from `start` to `stop`, which have failed together."""
        if not self._packing.healthy():
            raise DeviceFailed("the device has failed; the scheduler process has to start anew") from error
        hopeless = not self._passed and self._failed >= MAX_SINGLE_FAILURES
        if stop - start == 1 or hopeless:
            self._failed += 1
            part = self._stages.builder.part(step, start, stop)
            if part is not None:
                # It is not run, and what the row table owes the worker is others' as well.
                self._not_sent(part)
                self._blame(part, error)
            return
        middle = (start + stop) // 2
        for low, high in ((start, middle), (middle, stop)):
            if (part := self._stages.builder.part(step, low, high)) is None:
                continue
            try:
                result = self._packing.again(part)
            except Exception as again:
                self._not_sent(part)
                text = "requests %d to %d of batch %d fail again: %s"
                logger.warning(text, low, high - 1, step.number, text_of(again))
                if isinstance(again, StepLost):
                    self._planner.rewind(part)
                else:
                    self._halve(step, low, high, again)
            else:
                self._passed += 1
                self._commit(part, result)

    def _blame(self, part: Step, error: Exception) -> None:
        """End requests that have failed alone, or with no hope for any."""
        culprit = self._stages.culprits.of(error)
        text = f"the model failed: {text_of(error)}" if culprit is None else culprit.tell(error)
        reason = FinishReason(FinishType.ABORT, message=text, status=500)
        for req in part.batch.reqs:
            if not req.finished:
                self._requests.end(req, reason, keep=False)

    def _not_sent(self, step: Launched) -> None:
        """Have the worker told again what a step that failed was to tell it of the row table."""
        if isinstance(step, Step):
            self._stages.memory.rows.send_again(step.work.table)
