"""Unsampled: requests that no token can be drawn for, because their logits hold NaN or nothing finite."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.sampler import NO_TOKEN
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.executor import Done
from pegboard.core.pipeline.sampling_info import row_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.executor import Executor
    from pegboard.core.interfaces.logits_processor import LogitsProcessor
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.sampling import SamplingRow
    from pegboard.core.pipeline.step import Step
    from pegboard.toolkit.system.culprits import Culprits

logger = logging.getLogger(__name__)

BLAME = "blame"
"""The name under which it is asked."""
NO_PROCESSOR = -1
WHY = "its logits hold NaN, or nothing finite"


class Blame:
    """Where batches run: looks for the logits processor that leaves nothing of good logits."""

    def __init__(self, processors: Sequence[LogitsProcessor], vocab_size: int) -> None:
        self._processors = tuple(processors)
        self._vocab_size = vocab_size

    def run(self, row: SamplingRow) -> Done[int]:
        """Return the index of the processor that is to blame for the logits of a row; NO_PROCESSOR for none."""
        return Done(next((i for i, one in enumerate(self._processors) if self._spoils(one, row)), NO_PROCESSOR))

    def _spoils(self, processor: LogitsProcessor, row: SamplingRow) -> bool:
        # Not before: a scheduler without a model runs without torch.
        from pegboard.toolkit.sampling.sample import leaves_nothing

        try:
            wanted = processor.wants(row.params)
        except Exception:
            return False
        return wanted and leaves_nothing(processor, row, self._vocab_size)


class Unsampled:
    """Finds out why. A logits processor is to blame if it leaves nothing of good logits either; the model otherwise."""

    def __init__(self, processors: Sequence[LogitsProcessor], culprits: Culprits, executor: Executor) -> None:
        self._processors = tuple(processors)
        self._culprits = culprits
        self._executor = executor

    def reason(self, req: Req) -> FinishReason:
        """Return what the request ends with. Asks processors where batches run, and so waits for what is under way."""
        culprit = None
        found = self._executor.ask(BLAME, row_of(req)) if self._processors else NO_PROCESSOR
        if isinstance(found, int) and found != NO_PROCESSOR:
            culprit = self._culprits.known(self._processors[found])
            self._culprits.count(culprit)
        who = "the model failed" if culprit is None else f"{culprit} failed"
        logger.error("%s: nothing can be sampled for %s: %s", who, req.rid, WHY)
        message = f"{who}: nothing can be sampled: {WHY}"
        return FinishReason(FinishType.ABORT, message=message, status=500, code="not_sampleable")


def unsampled(step: Step, result: BatchResult) -> list[Req]:
    """Return the requests of a step that have got NO_TOKEN, and that had not ended before."""
    owners = np.arange(len(step.sampled))
    tokens = result.tokens
    if result.accepted is not None:
        owners, tokens = owners.repeat(result.accepted.counts), result.accepted.tokens
    return [req for owner in owners[tokens == NO_TOKEN].tolist() if not (req := step.sampled[owner]).finished]
