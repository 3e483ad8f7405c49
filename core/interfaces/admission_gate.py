"""Contract: holding a request back until something is ready, and keeping a finished one until something is done.

What is slow and belongs to single requests (a grammar to compile, KV to fetch or receive, weights to load, an
earlier turn of the same session) is a gate. The scheduler has one waiting queue, and a request enters it once every
gate is open.
"""

from __future__ import annotations

import abc
import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic

from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.options import Options, OptionsT

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.kv_transfer import KVTransfer, Region
    from pegboard.core.interfaces.prefix_cache import PrefixCache
    from pegboard.core.interfaces.req import Req


class GateOptions(Options):
    """Options that every gate has. A gate's own options derive from these."""

    timeout: float | None = 60.0
    """Seconds that a request may wait at this gate; then it ends with status 504. null: for ever."""

    hold_timeout: float | None = None
    """Seconds that this gate may keep what a finished request had in memory; then it has to let go. null: for ever."""


@dataclass(frozen=True, slots=True)
class KVAccess:
    """What a gate that brings KV from elsewhere works with. `regions` are K and V of each layer of the pool, in its
    order: region 2i and 2i + 1. A token's slot is its place in all of them. `identity` is equal where KV of equal
    tokens is, and `described` says for people what it depends on. `transfer` builds the chosen engine when it is first
    called.
    """

    page_size: int
    regions: tuple[Region, ...]
    identity: bytes
    described: Mapping[str, str]
    transfer: Callable[[], KVTransfer]


@dataclass(frozen=True, slots=True)
class AdmissionGateContext:
    """The clock that everything in the scheduler is timed by; the prefix cache, None where a gate is of no scheduler;
    the tokens of prompts that steps have computed per second of late, 0.0 while that is not known; and the KV pool,
    None as well where there is no scheduler. `rows` returns what stages send with a request's first token, by their
    names: it goes along with KV that another engine takes over (`Arrived.rows`).
    """

    clock: Clock = time.monotonic
    cache: PrefixCache | None = None
    prefill_speed: Callable[[], float] = float
    kv: KVAccess | None = None
    rows: Callable[[Req], Mapping[str, bytes]] = lambda req: {}


class GateState(enum.Enum):
    """What a gate says to a request."""

    OPEN = "open"
    BLOCKED = "blocked"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Seat:
    """A blocked request's place in memory. `slots` int32 [length] are those of its tokens, in their order; the gate
    must not keep an array of its own beyond the request's time at it. The first `start` are cached and full, and shared
    with other requests; the others are the gate's to fill.
    """

    slots: NDArray[np.int32]
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """What a gate has brought for a seated request: KV of its first `length` tokens, and the token that was sampled
    behind its prompt elsewhere, with the logprobs that the request wants of it (`tops` and `chosen` as pairs of logprob
    and token) and in `rows` what stages sent with it there (`AdmissionGateContext.rows`). With a token, `length` is the
    whole prompt; without one (None) the KV is cached, and the rest of the prompt is computed here. `cached_tokens` is
    what the client is told.
    """

    length: int
    token: int | None = None
    logprob: float | None = None
    tops: tuple[tuple[float, int], ...] = ()
    chosen: tuple[tuple[float, int], ...] = ()
    rows: Mapping[str, bytes] = field(default_factory=dict)
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """A gate's answer. `reason` says, for people, what a blocked request waits for, or why a failed one failed;
    `progress` is the share that is done, from 0 to 1, where that is known. `status` (HTTP), `code` and `param` go with
    a failure.

    A blocked request may ask for a `seat` (capability `seats`); `seated` gives it one when there is room. A request
    that goes on may bring what has `arrived` in it, and be allowed fewer tokens than it asked for: `max_new_tokens`,
    at least 1.

    `namespace` keeps the request's KV apart from that of requests with another one, or with "" (none): that of an
    adapter, say, or of a tenant. It comes with a verdict that blocks or opens, before the request has a seat, and holds
    for this gate: the pipeline composes it with those of other gates and the client's `cache_salt`. None: no change.
    """

    state: GateState
    reason: str = ""
    progress: float | None = None
    status: int = 0
    code: str = ""
    param: str = ""
    seat: bool = False
    arrived: Arrived | None = None
    max_new_tokens: int | None = None
    namespace: str | None = None

    @classmethod
    def blocked(cls, reason: str, progress: float | None = None, *, seat: bool = False) -> Verdict:
        return cls(GateState.BLOCKED, reason, progress, seat=seat)

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

    def seated(self, req: Req, seat: Seat) -> None:
        """Learn where a blocked request's KV goes to. Called once, with the capability `seats`, after a verdict that
        asked for it, when no step under way can touch the slots any more. The seat ends when the request goes on, or
        with `cancel`.
        """
        raise Unsupported(f"the gate {type(self).__name__}", "seats")

    def computed(self, req: Req, slots: NDArray[np.int32]) -> None:
        """Learn that the KV of a request's first tokens lies in these slots int32 [n]. Called after each step that has
        computed some of its prompt, with the capability `follows`, for requests that this gate has let through. It
        stays there until a call with fewer (none, where memory was taken from the request), or until the request ends
        and this gate does not hold it.
        """
        raise Unsupported(f"the gate {type(self).__name__}", "follows")

    def cancel(self, req: Req) -> bool | None:  # optional: most gates keep nothing of a request
        """Forget a request that has ended before it went through: it was aborted, its time ran out, or another gate
        failed it.

        Also called for one that this gate has let through and a later gate has not, and for one that it has failed
        itself. Of a request that it keeps nothing of it must not mind. True says that its seat may still be written to:
        its pages stay out of use until `released` names it.
        """
        return None

    def finished(self, req: Req) -> bool:
        """Learn that a request which went through all gates has ended, whichever way. True keeps its KV, status HELD,
        until `released` names it.
        """
        return False

    def released(self) -> Iterable[str]:
        """Rids of held requests that may go now, and of seats that are written to no more. Once per step while this
        gate has either.
        """
        return ()

    @property
    def busy(self) -> bool:
        """Whether `released` is to be called even while it blocks and holds no request, every few milliseconds: of a
        gate that others speak to.
        """
        return False

    def drop(self, req: Req) -> None:  # optional: only a gate that holds needs it
        """Let a held request go at once: it was aborted, or `released` has raised."""

    def stats(self) -> Mapping[str, float]:
        """Return what an operator may want to know of this gate (rooms by state, bytes brought...), by name."""
        return {}

    def close(self) -> None:  # optional: most gates have nothing to close
        """Let go of threads, files and connections. No other call comes after it."""
