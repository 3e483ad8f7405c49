"""Steps and their sources: what plans a step takes its result, and repairs it where it fails."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pegboard.core.interfaces.batch import PrefillItem, StageWork
    from pegboard.core.interfaces.executor import Pending
    from pegboard.core.interfaces.req import Req


class StepLost(RuntimeError):
    """A step cannot count, and no request is to blame: what it was to read has not come, for example. Any part of a
    step may raise it. The step is undone, and its requests are computed again.
    """


class Settle(enum.Enum):
    """The answer of a source that cannot plan before the results of the step under way are known."""

    SETTLE = "settle"


SETTLE: Final = Settle.SETTLE


@dataclass(slots=True)
class Launched:
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
class StageStep(Launched):
    """A step without a batch: a stage's own work."""

    work: StageWork


S = TypeVar("S", bound=Launched)
R = TypeVar("R")


class StepSource(ABC, Generic[S, R]):
    """Plans steps of one kind, S, and takes their results, R. All calls come from the scheduler's loop.

    For each step that is launched one of `settle`, `failed` and `behind_failed` is called, once, or `undo` after
    StepLost. Where steps overlap, the next one may have been launched when a step fails: that one is `behind_failed`.
    """

    turn: Literal["prefill", "decode"] = "prefill"
    """While requests decode, turns alternate: sources of one turn are asked in their order until one has a step."""

    @abstractmethod
    def next(self, flight: Launched | None) -> Launched | Settle | None:
        """Plan a step, with its memory allocated, to be launched at once; None where there is nothing to do.

        `flight` is the step under way. SETTLE asks for its results first: later sources of this turn are still asked,
        those of the other turn are not.
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
    def settle(self, step: S, result: R) -> None:
        """Take what a step has computed."""

    @abstractmethod
    def failed(self, step: S, error: Exception) -> None:
        """Repair a step that raised: find who is to blame, by halves (`Recovery.halve`) or otherwise, and end their
        requests. Nothing else is under way. Not called for StepLost: the step is undone.
        """

    @abstractmethod
    def undo(self, step: S) -> None:
        """Give up a step whose result is not going to be taken, or the rest of one of several launches. Its requests
        are computed again.
        """

    def behind_failed(self, step: S, failed: Launched, own_error: Exception | None) -> None:
        """Deal with a step that had been launched after one that failed. It has been waited for; `own_error` is what it
        raised itself. By default it does not count.
        """
        self.undo(step)


AnySource: TypeAlias = "StepSource[Any, Any]"
