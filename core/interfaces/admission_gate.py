"""Contract: holding a request back until something is ready, and keeping a finished one until something is done.

What is slow and belongs to single requests (a schema to compile, KV to fetch or receive, weights to load, an
earlier turn of the same session) is a gate. The scheduler has one waiting queue, and a request enters it once every
gate is open.
"""

from __future__ import annotations

import abc
import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from pegboard.core.interfaces.options import Component, Options, OptionsT

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.prefix_cache import PrefixCache
    from pegboard.core.interfaces.req import Req


class GateOptions(Options):
    """Options that every gate has. A gate's own options derive from these."""

    timeout: float | None = 60.0
    """Seconds that a request may wait at this gate; then it ends with status 504. null: for ever."""

    hold_timeout: float | None = None
    """Seconds for which this gate may keep the KV of a finished request. null: no limit."""


@dataclass(frozen=True, slots=True)
class KVAccess:
    """What a gate that brings KV from elsewhere works with. `identity` is equal where KV of equal tokens is, and
    `described` says for people what it depends on.
    """

    page_size: int
    pool: KVPool
    identity: bytes
    described: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AdmissionGateContext:
    """What a gate is built from: the scheduler's `clock`; the prefix `cache`, None without a scheduler;
    `prefill_speed`, the prompt tokens that steps have computed per second lately, 0.0 while not known; `kv` for gates
    that bring KV; and the scheduler's `stages` by name, for a plugin whose gate and stage work together.
    """

    clock: Clock = time.monotonic
    cache: PrefixCache | None = None
    prefill_speed: Callable[[], float] = float
    kv: KVAccess | None = None
    stages: Mapping[str, object] = field(default_factory=dict)


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

    A request that goes on may be allowed fewer tokens than it asked for: `max_new_tokens`, at least 1.

    `namespace` keeps the request's KV apart from that of requests with another one, or with "" (none): that of an
    adapter, say, or of a tenant. It comes with a verdict that blocks or opens, before the request has memory, and holds
    for this gate: the pipeline composes it with those of other gates and the client's `cache_salt`. None: no change.
    """

    state: GateState
    reason: str = ""
    progress: float | None = None
    status: int = 0
    code: str = ""
    param: str = ""
    max_new_tokens: int | None = None
    namespace: str | None = None

    @classmethod
    def blocked(cls, reason: str, progress: float | None = None) -> Self:
        return cls(GateState.BLOCKED, reason, progress)

    @classmethod
    def failed(cls, reason: str, *, status: int = 400, code: str = "refused_by_gate", param: str = "") -> Self:
        return cls(GateState.FAILED, reason, status=status, code=code, param=param)


OPEN = Verdict(GateState.OPEN)


class AdmissionGate(Component[OptionsT, AdmissionGateContext]):
    """Lets requests through when their time has come. Called by the scheduler's loop alone, so no call may block: work
    happens elsewhere (a thread, a process, the network), and `poll` looks how far it is.

    What a gate raises fails the request that it was asked about and no other. It keeps its own state of a request
    in a ReqSlot or under the request's `rid`, and forgets it when `cancel` or `finished` ends the matter.
    """

    name: str = ""
    """What the config calls it, set by the core once all gates are built."""

    @abc.abstractmethod
    def concerns(self, req: Req) -> bool:
        """Return whether the gate concerns itself with a request; asked once. False: it never hears of it again."""

    @abc.abstractmethod
    def enter(self, req: Req) -> Verdict:
        """Judge a request that has come to the gate. OPEN lets it go on at once. Its `params` may hold anything: the
        gate fails a request whose params it cannot read with a status from 400 to 499, and does not raise.
        """

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict | Exception]:
        """Return news of requests that this gate blocks, by rid, once per step; for others the last verdict stands. An
        exception fails its request alone, as if a call about this request had raised it.
        """
        return {}

    def passed(self, req: Req) -> bool:
        """Learn that a request which was blocked has passed all gates. False: it waits for its turn. True: the gate has
        taken it further, by `CoreServices.begin_computed` for example, or ended it.
        """
        return False

    def cancel(self, req: Req) -> bool | None:  # optional: most gates keep nothing of a request
        """Forget a request that has ended before it went through: it was aborted, its time ran out, or another gate
        failed it.

        Also called for one that this gate has let through and a later gate has not, and for one that it has failed
        itself. Of a request that it keeps nothing of it must not mind. True says that memory which was reserved for it
        may still be written to: its pages stay out of use until `released` names it.
        """
        return None

    def finished(self, req: Req) -> bool:
        """Learn that a request has ended that all gates let through. True keeps its KV (status HELD) until `released`
        names it.
        """
        return False

    def released(self) -> Iterable[str]:
        """Return held requests to let go, and those whose memory is written to no more, by rid, once per step while
        there are any.
        """
        return ()

    @property
    def busy(self) -> bool:
        """Whether to ask `released` every few milliseconds without any request too: for a gate that others speak to."""
        return False

    def drop(self, req: Req) -> None:  # optional: only a gate that holds needs it
        """Let a held request go at once: it was aborted, or `released` has raised."""

    def stats(self) -> Mapping[str, float]:
        """Return what an operator may want to know of this gate (rooms by state, bytes brought...), by name."""
        return {}

    def close(self) -> None:  # optional: most gates have nothing to close
        """Let go of threads, files and connections. No other call comes after it."""
