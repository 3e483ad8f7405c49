"""Steps and their sources: what plans a step takes its result, and repairs it where it fails."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, Self, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.batch import PrefillItem, ScheduleBatch, StageWork
    from pegboard.core.interfaces.batch_result import BatchResult
    from pegboard.core.interfaces.executor import Pending
    from pegboard.core.interfaces.req import Req


class StepLost(RuntimeError):
    """A step cannot count, and no request is to blame: what it was to read has not come, for example. Any part of a
    step may raise it. The step is undone, and its requests are computed again; one that loses many steps in a row, and
    gains no token in between, ends with status 500.
    """


class Settle(enum.Enum):
    """The answer of a source that cannot plan before the results of the step under way are known."""

    SETTLE = "settle"


SETTLE: Final = Settle.SETTLE


@dataclass(slots=True)
class BaseStep:
    """A step from its plan until its result is taken. `source` is set by the source that plans it. `touched` says that
    some request has ended while it was under way.
    """

    number: int
    touched: bool = field(default=False, kw_only=True)
    pending: Pending[object] | None = field(default=None, kw_only=True)
    source: AnySource = field(init=False, repr=False, compare=False)

    @property
    def reqs(self) -> Sequence[Req]:
        """Return the requests that it is for."""
        return ()


@dataclass(slots=True)
class BatchStep(BaseStep):
    """A step with a batch. One that is not `final` is a part of the split prefill `whole`, with nothing to commit."""

    batch: ScheduleBatch
    final: bool = field(default=True, kw_only=True)
    whole: Self | None = field(default=None, kw_only=True)

    @property
    def reqs(self) -> Sequence[Req]:
        return self.batch.reqs


@dataclass(slots=True)
class StageStep(BaseStep):
    """A step without a batch: a stage's own work."""

    work: StageWork


@dataclass(frozen=True, slots=True)
class TokenValues:
    """What goes with a token that another engine drew: the logprobs that its request wants (`tops` and `chosen` as
    pairs of logprob and token), what stages sent with it there, by name (`CoreServices.first_rows`), and the number of
    prompt tokens that were cached there, which the client is told.
    """

    logprob: float | None = None
    tops: tuple[tuple[float, int], ...] = ()
    chosen: tuple[tuple[float, int], ...] = ()
    rows: Mapping[str, bytes] = field(default_factory=dict)
    cached_tokens: int = 0


class CoreServices(Protocol):
    """What the core offers a stage and its sources (`Stage.sources`), in the scheduler's loop."""

    @property
    def decoding(self) -> bool:
        """Return whether some request runs, so that a decode step has something to compute."""

    def next_number(self) -> int:
        """Return the number of a step that the source makes."""

    @property
    def in_flight(self) -> BaseStep | None:
        """Return the step that is under way between two turns of the loop."""

    def slots(self, req: Req) -> NDArray[np.int64]:
        """Return the slots int64 [computed tokens] of a request's KV, to be read only; none where it has no memory."""

    def ask(self, stage: str, payload: object) -> object:
        """Have work of a stage done after all that is under way, and return its result. Raises what it raises."""

    def note(self, number: int, what: str, error: Exception) -> None:
        """Count and log that the step with this number failed for `what`, such as "2 requests"."""

    def told(self, what: str, error: Exception) -> str:
        """Return what clients learn of an error: the plugin that raised, else that `what` failed."""

    def end(self, reqs: Iterable[Req], message: str, code: str = "", status: int = 500) -> None:
        """End requests that are to blame for a failure, or for which there is nothing any more. None of their KV is
        shared.
        """

    def retract(self, req: Req) -> bool:
        """Take the memory of a request that runs, for others: it waits at the head of the queue with its output. Called
        when a plan begins (`Stage.begin_plan`). False where the results of the step under way are wanted first
        (`Stage.must_settle` asks for them), where launches are to come for it, or where it does not run.
        """

    def check_device(self, error: Exception) -> None:
        """Return if further work has a chance after this error. Raises what ends the scheduler's process otherwise."""

    def split(self, whole: BatchStep, layers: int, *, first: bool, last: bool) -> BatchStep:
        """Return the next `layers` of a prefill that `begin` was given; the last part is the step to commit."""

    def join(self, whole: BatchStep) -> None:
        """Let the requests of a prefill run, once its last part is planned or it has failed."""

    def commit(self, step: BatchStep, result: BatchResult) -> None:
        """Give the tokens of a batch to its requests."""

    def halve(self, step: BatchStep, error: Exception) -> None:
        """Run a failed batch in halves until the requests at fault are alone, and end these with status 500. Nothing
        else runs.
        """

    def rewind(self, step: BatchStep) -> None:
        """Undo a batch whose result is not going to be taken: what it admitted waits again."""

    def closed(self, step: BatchStep) -> None:
        """Note that a batch is through, or is not going to run. Once for each whole batch, after the above."""

    def rename(self, req: Req, stage: str, namespace: str) -> None:
        """Change what a stage's gate adds to a request's namespace. Raises TypeError for one with memory."""

    def reserve(self, req: Req) -> bool:
        """Give a blocked request memory for its prompt, after the `req.kv.cache_len` tokens of it that are cached.
        False where there is no room now. It then counts in admission as a running request does, until it goes on or
        ends.

        Its pages may have been those of a request that has ended, to which the step under way still writes. So nothing
        but later steps may touch them before `in_flight` is another one.
        """

    def reserved_slots(self, req: Req) -> NDArray[np.int32]:
        """Return the slots int32 [prompt tokens] of memory that was reserved."""

    def give_back(self, req: Req, computed: int = 0) -> None:
        """Take back what was reserved for a request. KV of the first `computed` tokens is there, and is cached."""

    def begin_computed(self, req: Req, length: int, token: int, values: TokenValues) -> None:
        """Let a blocked request run whose KV of the first `length` tokens is in its memory, and whose next token is
        `token`, which was drawn elsewhere. Every stage sees it in a step of mode PREBUILT, which computes nothing.
        """

    def first_rows(self, req: Req) -> Mapping[str, bytes]:
        """Return what stages send with a request's first token, by name: for `TokenValues.rows` of the engine that goes
        on with it.
        """


S = TypeVar("S", bound=BaseStep)
R = TypeVar("R")


class StepSource(ABC, Generic[S, R]):
    """Plans steps of one kind, S, and takes their results, R. All calls come from the scheduler's loop.

    For each step that is launched one of `process_result`, `failed` and `behind_failed` is called, once, or `undo`
    after StepLost. Where steps overlap, the next one may be launched when a step fails: that one is `behind_failed`.
    """

    turn: Literal["prefill", "decode"] = "prefill"
    """While requests decode, turns alternate: sources of one turn are asked in their order until one has a step."""
    first: bool = False
    """Whether it is asked before the core's own sources of its turn, and not after them."""

    @abstractmethod
    def next(self, in_flight: BaseStep | None) -> BaseStep | Settle | None:
        """Plan a step, with its memory allocated, to be launched at once; None where there is nothing to do.

        `in_flight` is the step under way. SETTLE asks for its results first: later sources of this turn are still
        asked, those of the other turn are not.
        """

    @property
    def under_way(self) -> S | None:
        """Return the step that takes several launches, some of which are still to come."""
        return None

    def holds(self, req: Req) -> bool:
        """Return whether the memory of a request that has ended is still needed, for launches that are to come."""
        step = self.under_way
        return step is not None and req in step.reqs

    def takes(self, items: Sequence[PrefillItem]) -> bool:
        """Return whether this source runs a prefill in its own way. Asked before the batch is built, where no decodes
        are mixed in; `begin` follows where the answer is True.
        """
        return False

    def begin(self, step: S) -> S:
        """Return the first launch of a prefill that this source takes."""
        raise NotImplementedError

    @abstractmethod
    def process_result(self, step: S, result: R) -> None:
        """Take what a step has computed."""

    @abstractmethod
    def failed(self, step: S, error: Exception) -> None:
        """Repair a step that raised: find who is to blame, by halves (`Recovery.halve`) or otherwise, and end their
        requests. Nothing else is under way. Not called for StepLost: the step is undone.
        """

    @abstractmethod
    def undo(self, step: S) -> None:
        """Give up a step, or the rest of one of several launches. Its requests are computed again."""

    def behind_failed(self, step: S, failed: BaseStep, own_error: Exception | None) -> None:
        """Deal with a step launched after one that failed, now through; `own_error` is its own. By default, undo it."""
        self.undo(step)


AnySource: TypeAlias = "StepSource[Any, Any]"
