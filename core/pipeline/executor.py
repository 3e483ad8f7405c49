"""LocalExecutor: runs batches in this process, in the loop's own thread or in one beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeVar

from pegboard.core.interfaces.batch import StageWork
from pegboard.core.interfaces.executor import Executor, Pending

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import ModelWorkerBatch, TableChanges
    from pegboard.core.interfaces.batch_result import BatchResult

R = TypeVar("R")
Work = TypeVar("Work")
Launch = Callable[["ModelWorkerBatch"], Pending["BatchResult"]]
RunStage = Callable[..., Pending[object]]
"""Starts a stage's work, of which it gets the payload."""


class Done(Generic[R]):
    """A result that is there already, or the error in its place."""

    def __init__(self, result: R | None, error: Exception | None = None) -> None:
        self._result = result
        self._error = error

    def result(self) -> R:
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def outcome(pending: Pending[object] | None) -> tuple[object, Exception | None]:
    """Wait for a step; its result, and what it raised."""
    assert pending is not None
    try:
        return pending.result(), None
    except Exception as error:
        return None, error


class _InThread(Generic[R]):
    """What the thread launched; on an asynchronous device it may still run when the launch is done."""

    def __init__(self, launched: Callable[[], Pending[R]]) -> None:
        self._launched = launched

    def result(self) -> R:
        return self._launched().result()


class LocalExecutor(Executor):
    """Runs batches where the scheduler is. Without `thread` a launch returns when the batch is computed, or, on an
    asynchronous device, when it is under way there. With it, batches are launched in a thread of their own, so that the
    loop can plan the next one meanwhile.

    `rerun` runs a part of a failed batch; `launch` does where it is None. `stages` run the work of stages, by name;
    `send_table` brings changes of the row table before that.
    """

    def __init__(
        self,
        launch: Launch,
        rerun: Callable[[ModelWorkerBatch], BatchResult] | None = None,
        healthy: Callable[[], bool] | None = None,
        stages: Mapping[str, RunStage] = MappingProxyType({}),
        *,
        send_table: Callable[[TableChanges], None] | None = None,
        thread: bool = False,
    ) -> None:
        self._launch = launch
        self._rerun = rerun
        self._healthy = healthy
        self._stages = stages
        self._send_table = send_table
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward") if thread else None

    def submit(self, work: ModelWorkerBatch | StageWork) -> Pending[object]:
        if self._thread is not None:
            return _InThread(self._thread.submit(self._start, work).result)
        try:
            return self._start(work)
        except Exception as error:
            return Done(None, error)

    def rerun(self, work: ModelWorkerBatch) -> BatchResult:
        return self._now(self._rerun or (lambda part: self._launch(part).result()), work)

    def ask(self, stage: str, payload: object, table: TableChanges | None = None) -> object:
        return self._now(lambda work: self._start(work).result(), StageWork(stage, payload, table))

    def healthy(self) -> bool:
        return self._healthy is None or self._healthy()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _start(self, work: ModelWorkerBatch | StageWork) -> Pending[object]:
        if not isinstance(work, StageWork):
            return self._launch(work)
        run = self._stages.get(work.stage)
        if run is None:
            raise RuntimeError(f"no part of the stage {work.stage!r} is where batches run")
        if work.table is not None and self._send_table is not None:
            self._send_table(work.table)
        return run(work.payload)

    def _now(self, what: Callable[[Work], R], work: Work) -> R:
        return what(work) if self._thread is None else self._thread.submit(what, work).result()
