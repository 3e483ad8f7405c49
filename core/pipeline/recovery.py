"""Recovery: a forward pass that raised is run again in halves, until the request to blame is alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pegboard.core.registry.blame import text_of

if TYPE_CHECKING:
    from pegboard.core.pipeline.batch import BatchBuilder
    from pegboard.core.pipeline.batch_result import BatchResult
    from pegboard.core.pipeline.executor import Executor
    from pegboard.core.pipeline.step import Step

logger = logging.getLogger(__name__)

MAX_SINGLE_FAILURES = 4
"""After so many requests have failed alone and none has passed, the fault is not one request's: all fail."""


class DeviceFailed(RuntimeError):
    """The device does not come back. The process has to start anew."""


class Recovery:
    """Bisection of a failed step, allowed because nothing of it was committed: its KV goes to the same places again."""

    def __init__(self, builder: BatchBuilder, executor: Executor) -> None:
        self._builder = builder
        self._executor = executor
        self._passed = 0
        self._failed = 0

    def parts(self, step: Step, error: Exception) -> Iterator[tuple[Step, BatchResult | None, Exception]]:
        """Yield parts of the step with their results, or with None and the error where a request failed alone.

        The caller commits each part before it asks for the next one. Raises DeviceFailed where another forward pass
        has no chance.
        """
        self._passed = self._failed = 0
        yield from self._split(step, 0, len(step.batch.reqs), error)

    def _split(
        self, step: Step, start: int, stop: int, error: Exception
    ) -> Iterator[tuple[Step, BatchResult | None, Exception]]:
        if not self._executor.healthy():
            raise DeviceFailed("the device has failed; the scheduler process has to start anew") from error
        hopeless = not self._passed and self._failed >= MAX_SINGLE_FAILURES
        if stop - start == 1 or hopeless:
            self._failed += 1
            lost = self._builder.part(step, start, stop)
            if lost is not None:
                yield lost, None, error
            return
        middle = (start + stop) // 2
        for low, high in ((start, middle), (middle, stop)):
            part = self._builder.part(step, low, high)
            if part is None:
                continue
            try:
                result = self._executor.again(part.work)
            except Exception as again:
                logger.warning(
                    "requests %d to %d of batch %d fail again: %s", low, high - 1, step.number, text_of(again)
                )
                yield from self._split(step, low, high, again)
            else:
                self._passed += 1
                yield part, result, error
