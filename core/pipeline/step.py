"""Step: one batch from its launch until its results are taken. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch import EncodeWork, ModelWorkerBatch, ScheduleBatch
    from pegboard.core.interfaces.req import Req, ReqKV
    from pegboard.core.pipeline.batch_result import BatchResult
    from pegboard.core.pipeline.speculation.drafts import Drafts


class Pending(Protocol):
    """A result on its way."""

    def result(self) -> BatchResult:
        """Wait for it. Raises what the forward pass raised; the KV of its tokens is then undefined."""


class PendingEncode(Protocol):
    """Media that are being encoded."""

    def result(self) -> float:
        """Wait for it; the seconds that it took. Raises what the encoder raised; nothing is kept of the list then."""


@dataclass(slots=True)
class Step:
    """A launched batch. All arrays have one entry per sampled request, in the batch's order.

    `kvs` are the `Req.kv` of `batch.reqs` as they were at launch: a request that ended or was retracted since has
    another one. `version` is that of the running batch when all of it decodes here, NEVER otherwise. `touched` says
    that some request of it ended while it was under way. A step that is not `final` is one part of a split prefill, of
    `whole`, and has nothing to commit. `asks` are the flags that some of its requests have. `columns`: what the running
    batch kept of each column, in a decode. `notes`: see LaunchedStep. `packed` and `closed` say what stages were told.
    `drafts` are verified in this step. `launched_at` is of the scheduler's clock.
    """

    number: int
    batch: ScheduleBatch
    work: ModelWorkerBatch
    kvs: list[ReqKV]
    sampled: list[Req]
    left: NDArray[np.int64]
    flags: NDArray[np.int64]
    version: int
    touched: bool = False
    final: bool = True
    whole: Step | None = None
    asks: int = 0
    columns: list[NDArray[np.generic]] = field(default_factory=list)
    notes: dict[str, object] = field(default_factory=dict)
    packed: bool = False
    closed: bool = False
    drafts: Drafts | None = None
    launched_at: float = 0.0
    pending: Pending | None = None

    def drafts_of(self, index: int) -> int:
        """Return how many tokens are drafted for a sampled request, by its index among them."""
        return 0 if self.drafts is None else int(self.drafts.trees.counts[index]) - 1

    @property
    def prefilled(self) -> list[Req]:
        """The requests some of whose prompt it computes."""
        return self.batch.reqs[: len(self.batch.reqs) - self.batch.decoding]


@dataclass(slots=True)
class EncodeStep:
    """Media that are encoded in a step of their own. `owners` are the requests that want each piece. `touched` has no
    meaning here: nothing is committed.
    """

    number: int
    work: EncodeWork
    owners: tuple[tuple[Req, ...], ...]
    touched: bool = False
    pending: PendingEncode | None = None


Launched = Step | EncodeStep
