"""Services: what the core offers the sources of steps that stages bring."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.pipeline.step import Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.executor import Executor
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.step import BatchStep
    from pegboard.core.pipeline.planner import Planner
    from pegboard.core.pipeline.recovery import Recovery


class Services:
    """The CoreServices of one scheduler. `commit` gives a step's tokens to its requests."""

    def __init__(
        self, planner: Planner, recovery: Recovery, executor: Executor, commit: Callable[[Step, BatchResult], None]
    ) -> None:
        self._planner = planner
        self._recovery = recovery
        self._executor = executor
        self._commit = commit

    @property
    def decoding(self) -> bool:
        return bool(self._planner.running)

    def next_number(self) -> int:
        return self._planner.builder.next_number()

    def slots(self, req: Req) -> NDArray[np.int64]:
        return self._planner.memory.rows.host[req.kv.row, : req.kv.committed_len].astype(np.int64)

    def ask(self, stage: str, payload: object) -> object:
        return self._executor.ask(stage, payload)

    def note(self, number: int, what: str, error: Exception) -> None:
        self._recovery.note(number, what, error)

    def told(self, what: str, error: Exception) -> str:
        return self._recovery.told(what, error)

    def end(self, reqs: Iterable[Req], message: str, code: str = "") -> None:
        self._recovery.end(reqs, message, code)

    def check_device(self, error: Exception) -> None:
        self._recovery.check_device(error)

    def split(self, whole: BatchStep, layers: int, *, first: bool, last: bool) -> BatchStep:
        return self._planner.builder.split(_ours(whole), layers, first=first, last=last)

    def join(self, whole: BatchStep) -> None:
        self._planner.builder.join(_ours(whole), self._planner.running)

    def commit(self, step: BatchStep, result: BatchResult) -> None:
        self._commit(_ours(step), result)

    def halve(self, step: BatchStep, error: Exception) -> None:
        self._recovery.halve(_ours(step), error)

    def rewind(self, step: BatchStep) -> None:
        self._planner.rewind(_ours(step))

    def closed(self, step: BatchStep) -> None:
        self._planner.closed(_ours(step))


def _ours(step: BatchStep) -> Step:
    assert isinstance(step, Step), "batches are made by the core"
    return step
