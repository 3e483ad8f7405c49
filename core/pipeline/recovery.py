"""Recovery: the source of a step that raised repairs it, a batch by halves, until the request to blame is alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.interfaces.step import StepLost
from pegboard.core.pipeline.executor import outcome
from pegboard.core.pipeline.lost import MAX_LOST_STEPS, lost_too_often
from pegboard.core.pipeline.step import Step
from pegboard.toolkit.system.blame import text_of

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.step import BaseStep
    from pegboard.core.pipeline.components import Components
    from pegboard.core.pipeline.counters import Counters
    from pegboard.core.pipeline.lifecycle import Lifecycle
    from pegboard.core.pipeline.planner import Planner

logger = logging.getLogger(__name__)

MAX_SINGLE_FAILURES = 4
"""After so many requests of a step have failed alone and none has passed, the fault is not that of one: all fail."""


class DeviceFailed(RuntimeError):
    """The device does not come back. The process has to start anew."""


class Recovery:
    """Nothing of a step that raised was committed, so its KV may go to the same places again."""

    def __init__(
        self,
        components: Components,
        planner: Planner,
        requests: Lifecycle,
        counters: Counters,
        commit: Callable[[Step, BatchResult], None],
    ) -> None:
        self._components = components
        self._planner = planner
        self._requests = requests
        self._counters = counters
        self._commit = commit
        self._passed = self._failed = 0

    def recover(self, step: BaseStep, error: Exception, behind: BaseStep | None) -> None:
        """Recover from a step that raised, and from `behind`, which had been launched after it, if one had."""
        self._not_sent(step)
        own_error = None
        if behind is not None:
            _, own_error = outcome(behind.pending)
            self._not_sent(behind)
        lost = isinstance(error, StepLost)
        if lost:
            self.note(step.number, f"{len(step.reqs)} requests", error)
            if isinstance(step, Step) and step.loads:
                self._components.memory.guarded.load_failed()
            self._give_up(step, error)
        else:
            step.source.failed(step, error)
        # Only now: a request whose chunk failed may have its next one in the step after, and has to be tried first.
        if behind is not None:
            behind.source.behind_failed(behind, step, own_error)
        if lost:
            step.source.undo(step)
        self._planner.running.rewind()

    def note(self, number: int, what: str, error: Exception) -> None:
        """Count and log a failure of the step with this number: of `what`."""
        self._counters.failed_batches += 1
        culprit = self._components.culprits.of(error)
        self._components.culprits.count(culprit)
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
        self.check_device(error)
        hopeless = not self._passed and self._failed >= MAX_SINGLE_FAILURES
        if stop - start == 1 or hopeless:
            self._failed += 1
            if (half := self._components.builder.half(step, start, stop)) is not None:
                # It is not run, and what the row table owes the worker is others' as well.
                self._not_sent(half)
                self.end(half.reqs, self.told("the model", error))
            return
        middle = (start + stop) // 2
        for low, high in ((start, middle), (middle, stop)):
            if (half := self._components.builder.half(step, low, high)) is None:
                continue
            try:
                result = self._components.rerun(half)
            except Exception as err:
                self._not_sent(half)
                logger.warning("requests %d to %d of batch %d fail again: %s", low, high - 1, step.number, text_of(err))
                if isinstance(err, StepLost):
                    self._give_up(half, err)
                    self._planner.rewind(half)
                else:
                    self._halve(step, low, high, err)
            else:
                self._passed += 1
                self._commit(half, result)

    def check_device(self, error: Exception) -> None:
        """Raise DeviceFailed where another forward pass has no chance after this error."""
        if not self._components.executor.healthy():
            raise DeviceFailed("the device has failed; the scheduler process has to start anew") from error

    def _give_up(self, step: BaseStep, error: Exception) -> None:
        """End requests that have lost too many steps; prompts first, since others may have lost theirs by them."""
        over = lost_too_often(step.reqs)
        prompts = [req for req in over if isinstance(step, Step) and req in step.prefilled]
        self.end(prompts or over, f"{MAX_LOST_STEPS} steps were lost, one after the other: {text_of(error)}")

    def end(self, reqs: Iterable[Req], message: str, code: str = "", status: int = 500) -> None:
        """End requests; none of their KV is shared."""
        reason = FinishReason(FinishType.ABORT, message=message, status=status, code=code)
        for req in reqs:
            if not req.finished:
                self._requests.end(req, reason, keep=False)

    def told(self, what: str, error: Exception) -> str:
        """Return what clients learn of an error: the plugin that raised, else `what` failed."""
        culprit = self._components.culprits.of(error)
        return f"{what} failed: {text_of(error)}" if culprit is None else culprit.tell(error)

    def _not_sent(self, step: BaseStep) -> None:
        """Have the worker told again what a step that has failed was to tell it of the row table."""
        if isinstance(step, Step):
            self._components.memory.rows.send_again(step.work.table)
