"""Contract: holding a request back until something is ready, and keeping a finished one until something is done.

What is slow and belongs to single requests (a grammar to compile, KV to prefetch or receive, weights to load, an
earlier turn of the same session) is a gate. The scheduler has one waiting queue, and a request enters it once every
gate is open.
"""

from __future__ import annotations

import abc
import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from pegboard.core.interfaces.options import Options, OptionsT

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.prefix_cache import PrefixCache
    from pegboard.core.interfaces.req import Req


class GateOptions(Options):
    """Options that every gate has. A gate's own options derive from these."""

    timeout: float | None = 60.0
    """Seconds that a request may wait at this gate; then it ends with status 504. null: for ever."""


@dataclass(frozen=True, slots=True)
class AdmissionGateContext:
    """The clock that everything in the scheduler is timed by; the prefix cache, None where a gate is of no scheduler;
    and the tokens of prompts that steps have computed per second of late, 0.0 while that is not known.
    """

    clock: Clock = time.monotonic
    cache: PrefixCache | None = None
    prefill_speed: Callable[[], float] = float


class GateState(enum.Enum):
    """What a gate says to a request."""

    OPEN = "open"
    BLOCKED = "blocked"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A gate's answer. `reason` says, for people, what a blocked request waits for, or why a failed one failed;
    `progress` is the share that is done, from 0 to 1, where that is known. `status` (HTTP), `code` and `param` go with
    a failure.
    """

    state: GateState
    reason: str = ""
    progress: float | None = None
    status: int = 0
    code: str = ""
    param: str = ""

    @classmethod
    def blocked(cls, reason: str, progress: float | None = None) -> Verdict:
        return cls(GateState.BLOCKED, reason, progress)

    @classmethod
    def failed(cls, reason: str, *, status: int = 400, code: str = "refused_by_gate", param: str = "") -> Verdict:
        return cls(GateState.FAILED, reason, status=status, code=code, param=param)


OPEN = Verdict(GateState.OPEN)


class AdmissionGate(abc.ABC, Generic[OptionsT]):
    """Lets requests through when their time has come. Called by the scheduler's loop alone, so no call may block: work
    happens elsewhere (a thread, a process, the network), and `poll` looks how far it is.

    What a gate raises fails the request that it was asked about and no other. It keeps its own state of a request
    in a ReqSlot or under the request's `rid`, and forgets it when `cancel` or `finished` ends the matter.
    """

    def __init__(self, options: OptionsT, ctx: AdmissionGateContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: AdmissionGateContext) -> str | None:
        """Return None, or the reason why it cannot work here."""
        return None

    @abc.abstractmethod
    def concerns(self, req: Req) -> bool:
        """Return whether the gate has anything to do with this request; asked once. False: it never hears of it
        again.
        """

    @abc.abstractmethod
    def enter(self, req: Req) -> Verdict:
        """Judge a request that has come to the gate. OPEN lets it go on at once. What it says in its `params` may be
        anything: a gate that cannot make sense of it fails the request with a status from 400 to 499, and does not
        raise.
        """

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        """News of requests that this gate blocks, by rid; of those left out the last verdict stands. Once per step."""
        return {}

    def cancel(self, req: Req) -> None:  # optional: most gates keep nothing of a request
        """Forget a request that has ended before it went through: it was aborted, its time ran out, or another gate
        failed it.

        Also called for one that this gate has let through and a later gate has not, and for one that it has failed
        itself. Of a request that it keeps nothing of it must not mind.
        """

    def finished(self, req: Req) -> bool:
        """Learn that a request which went through all gates has ended, whichever way. True keeps its KV, status HELD,
        until `released` names it.
        """
        return False

    def released(self) -> Iterable[str]:
        """Rids of held requests that may go now. Once per step while this gate holds a request."""
        return ()

    def drop(self, req: Req) -> None:  # optional: only a gate that holds needs it
        """Let a held request go at once: it was aborted, or `released` has raised."""
