"""Executor: where batches run, and what stages have done beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import ModelWorkerBatch, StageWork, TableChanges
    from pegboard.core.interfaces.batch_result import BatchResult

R_co = TypeVar("R_co", covariant=True)


@runtime_checkable
class Pending(Protocol[R_co]):
    """A result on its way."""

    def result(self) -> R_co:
        """Wait for it. Raises what was raised meanwhile; the KV of a batch's tokens is then undefined."""


class Executor(ABC):
    """Runs batches, and the work of stages, in the order in which they are submitted: one at a time, or with several
    `lanes` one in each.

    All that it is given is plain values and arrays, so that a provider may send it to other processes. One thread calls
    it, that of the scheduler's loop.
    """

    lanes: int = 1
    """How many batches it computes at once, where they are for different requests. With more than one, the loop
    `overlap` has each decode step compute a token for so large a share of the requests. Calls of device parts for
    different batches then alternate; a stage's work, and a batch that needs tokens of the one before, run alone."""

    @abstractmethod
    def submit(self, work: ModelWorkerBatch | StageWork) -> Pending[object]:
        """Start a batch (its result: BatchResult) or a stage's work (a result of its own). What these raise, `result`
        raises.
        """

    @abstractmethod
    def rerun(self, work: ModelWorkerBatch) -> BatchResult:
        """Run part of a failed batch now, without step hooks and with nothing under way. Raises what the forward pass
        raises.
        """

    @abstractmethod
    def ask(self, stage: str, payload: object, table: TableChanges | None = None) -> object:
        """Run a stage's work after all that is under way, with these table changes; return its result. Raises what it
        raises.
        """

    @abstractmethod
    def healthy(self) -> bool:
        """Return whether another forward pass has a chance; False once the device itself has failed."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way and take nothing more."""
