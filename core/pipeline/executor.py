"""Executors: how a launched batch reaches the worker: in the loop's own thread, or in one beside it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pegboard.core.pipeline.batch_result import BatchResult
from pegboard.core.pipeline.step import Pending, PendingEncode

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import DraftWork, EncodeWork, ModelWorkerBatch
    from pegboard.core.interfaces.speculator import DraftTrees

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
Run = Callable[["ModelWorkerBatch"], BatchResult]
Launch = Callable[["ModelWorkerBatch"], Pending]
Encode = Callable[["EncodeWork"], PendingEncode]
"""Launches the encoding of media."""
Draft = Callable[["DraftWork"], "DraftTrees"]
"""Drafts on the device."""


def no_media(work: EncodeWork) -> PendingEncode:
    """Stand for the encoder of a model without one."""
    raise RuntimeError("this engine has no media encoder")


def no_drafts(work: DraftWork) -> DraftTrees:
    """Stand for the drafts of an engine whose speculator, if any, drafts on the host."""
    raise RuntimeError("this engine does not draft on the device")


class Executor(Protocol):
    """Runs batches in the order in which they are submitted, never two at a time."""

    def submit(self, work: ModelWorkerBatch) -> Pending:
        """Start a batch. Never raises what the forward pass raises: `Pending.result` does."""

    def again(self, work: ModelWorkerBatch) -> BatchResult:
        """Run a part of a failed batch at once, without step hooks. Nothing else may be under way."""

    def encode(self, work: EncodeWork) -> PendingEncode:
        """Start to encode media, in launch order with the batches. Never raises what the encoder raises."""

    def draft(self, work: DraftWork) -> DraftTrees:
        """Draft on the device at once. Nothing else may be under way. Raises what the speculator raises."""

    def call(self, what: Callable[[], R]) -> R:
        """Call something where batches run, behind those that are under way, and return its result. Raises what it
        raises.
        """

    def healthy(self) -> bool:
        """Return whether another forward pass has a chance; False once the device itself has failed."""

    def close(self) -> None:
        """Wait for what is under way and take nothing more."""


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


class InlineExecutor:
    """Runs a batch when it is submitted."""

    def __init__(
        self,
        run: Run,
        again: Run | None = None,
        healthy: Callable[[], bool] | None = None,
        encode: Encode = no_media,
        draft: Draft = no_drafts,
    ) -> None:
        self._run = run
        self._draft = draft
        self._again = again or run
        self._healthy = healthy
        self._encode = encode

    def submit(self, work: ModelWorkerBatch) -> Pending:
        try:
            return Done(self._run(work))
        except Exception as error:
            return Done(None, error)

    def encode(self, work: EncodeWork) -> PendingEncode:
        try:
            return self._encode(work)
        except Exception as error:
            return Done(None, error)

    def again(self, work: ModelWorkerBatch) -> BatchResult:
        return self._again(work)

    def draft(self, work: DraftWork) -> DraftTrees:
        return self._draft(work)

    def call(self, what: Callable[[], R]) -> R:
        return what()

    def healthy(self) -> bool:
        return self._healthy is None or self._healthy()

    def close(self) -> None:
        pass


class LaunchExecutor(InlineExecutor):
    """Launches a batch when it is submitted, in the loop's own thread; an asynchronous device computes it meanwhile."""

    def __init__(
        self,
        launch: Launch,
        again: Run,
        healthy: Callable[[], bool] | None = None,
        encode: Encode = no_media,
        draft: Draft = no_drafts,
    ) -> None:
        super().__init__(again, again, healthy, encode, draft)
        self._launch = launch

    def submit(self, work: ModelWorkerBatch) -> Pending:
        try:
            return self._launch(work)
        except Exception as error:
            return Done(None, error)


class _Later(Protocol[R_co]):
    def result(self) -> R_co: ...


class _InThread(Generic[R]):
    """What the thread launched; on an asynchronous device it may still run when the launch is done."""

    def __init__(self, launched: Callable[[], _Later[R]]) -> None:
        self._launched = launched

    def result(self) -> R:
        return self._launched().result()


class ThreadExecutor:
    """Runs batches in one thread of its own, so that the loop's thread can plan the next one meanwhile."""

    def __init__(
        self,
        launch: Launch,
        again: Run,
        healthy: Callable[[], bool] | None = None,
        encode: Encode = no_media,
        draft: Draft = no_drafts,
    ) -> None:
        self._launch = launch
        self._draft = draft
        self._again = again
        self._healthy = healthy
        self._encode = encode
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")

    def submit(self, work: ModelWorkerBatch) -> Pending:
        return _InThread(self._thread.submit(self._launch, work).result)

    def again(self, work: ModelWorkerBatch) -> BatchResult:
        return self._thread.submit(self._again, work).result()

    def draft(self, work: DraftWork) -> DraftTrees:
        return self._thread.submit(self._draft, work).result()

    def call(self, what: Callable[[], R]) -> R:
        return self._thread.submit(what).result()

    def encode(self, work: EncodeWork) -> PendingEncode:
        return _InThread(self._thread.submit(self._encode, work).result)

    def healthy(self) -> bool:
        return self._healthy is None or self._healthy()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
