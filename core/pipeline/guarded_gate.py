"""GuardedGate: an admission gate whose calls are guarded and verdicts checked; where requests stand with the gates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from msgspec import structs

from pegboard.core.interfaces.admission_gate import AdmissionGate, GateState, Verdict
from pegboard.core.interfaces.keys import PrefixMemo
from pegboard.core.interfaces.req import NO_ROW
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.memory import MemoryCorrupted
from pegboard.toolkit.system.blame import in_words
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_NAMESPACE = 1024
"""Characters that a gate's part of a namespace may have."""


class GuardedGate:
    """One gate under its name, with the requests that it blocks and holds, by rid.

    Each call is guarded: if it raises, or its answer is not a verdict, the request in question fails with status 500
    and the gate's name. The log has the traceback of the first time, and a line of each.
    """

    def __init__(self, name: str, gate: AdmissionGate) -> None:
        self.name = gate.name = name
        self.gate = gate
        self.timeout: float | None = getattr(gate.options, "timeout", None)
        self.hold_timeout: float | None = getattr(gate.options, "hold_timeout", None)
        self.watchful = type(gate).busy is not AdmissionGate.busy
        self.blocked: dict[str, Req] = {}
        self.held: dict[str, Req] = {}
        self.failures = 0
        """Calls that raised, since the start."""
        self._known: set[str] = set()  # calls that have raised before, whose traceback is in the log

    def ask(self, what: str, call: Callable[[Req], T], req: Req) -> tuple[T | None, Verdict | None]:
        """Return the answer about one request, or the failure that an exception makes of it."""
        try:
            return call(req), None
        except MemoryCorrupted:
            raise
        except Exception as error:
            return None, self.raised(what, error, req.name)

    def enter(self, req: Req, progress: GateProgress) -> Verdict:
        try:
            return taken(self.gate.enter(req), req, progress, self.name)
        except Exception as error:
            return self.raised("enter", error, req.name)

    def poll(self, waiting: Sequence[Req]) -> Mapping[str, object]:
        """Return what is new of blocked requests, to be `examined`. Where it raises, it is about all of them, since it
        does not say which.
        """
        try:
            return dict(self.gate.poll(waiting))
        except MemoryCorrupted:
            raise
        except Exception as error:
            return dict.fromkeys((req.rid for req in waiting), self.raised("poll", error))

    def examined(self, verdict: object, req: Req, progress: GateProgress) -> Verdict:
        """Return a verdict of `poll`, taken to its request."""
        try:
            if isinstance(verdict, Exception):
                raise verdict
            return taken(verdict, req, progress, self.name)
        except Exception as error:
            return self.raised("poll", error, req.name)

    def stats(self) -> dict[str, float]:
        try:
            return {name: float(value) for name, value in self.gate.stats().items()}
        except Exception as error:
            self.raised("stats", error)
            return {}

    def close(self) -> None:
        try:
            self.gate.close()
        except Exception as error:
            self.raised("close", error)

    def raised(self, what: str, error: Exception, name: str = "") -> Verdict:
        """Count and log an exception of a call. Return the failure that it is."""
        self.failures += 1
        trace = None if what in self._known else error
        self._known.add(what)
        whose = f" of {quoted(name)}" if name else ""
        told = in_words(error)
        logger.error("the gate %r failed in %s%s: %s", self.name, what, whose, told, exc_info=trace)
        return Verdict.failed(f"the gate {self.name!r} failed: {told}", status=500, code="gate_failed")


@dataclass(slots=True)
class GateEvents:
    """What has changed since the last step: requests that have passed all gates, that failed, that are held no more."""

    ready: list[Req] = field(default_factory=list)
    failed: list[tuple[Req, FinishReason]] = field(default_factory=list)
    released: list[Req] = field(default_factory=list)


@dataclass(slots=True)
class GateProgress:
    """A request on its way: the gates that concern it, how many of them it has passed, and where it stands, since when.
    `namespace` is the one that it came with, and `added` what gates have added to it, by their names. `quarantined`: it
    has ended, and its memory is still written to.
    """

    entries: list[GuardedGate]
    passed: int
    since: float
    verdict: Verdict
    namespace: str
    added: dict[str, str] = field(default_factory=dict)
    holders: set[str] = field(default_factory=set)
    quarantined: bool = False


def taken(verdict: object, req: Req, progress: GateProgress, gate: str) -> Verdict:
    """Do to a request what a gate's verdict says of it, and return the verdict, fit to be compared, counted and sent.
    Raises TypeError for what is not one.
    """
    found = validate(verdict)
    if found.namespace is not None and found.state is not GateState.FAILED:
        rename(req, progress, gate, found.namespace)
    if found.state is GateState.OPEN:
        limit(req, found.max_new_tokens)
    return found


def rename(req: Req, progress: GateProgress, gate: str, added: str) -> None:
    """Put a request into the namespace that follows from what a gate adds now. Raises TypeError where it has memory."""
    parts = {**progress.added, gate: added}
    namespace = composed({name: part for name, part in parts.items() if part}, progress.namespace)
    if namespace != req.namespace and req.kv.row != NO_ROW:
        raise TypeError("the namespace of a request cannot change once it has memory, whose KV was found in it")
    progress.added = parts
    move(req, namespace)


def validate(verdict: object) -> Verdict:
    """Return the verdict, fit to be compared, counted and sent. Raises TypeError for what is not one."""
    if not isinstance(verdict, Verdict) or not isinstance(verdict.state, GateState):
        raise TypeError(f"it answered {verdict!r}, which is not a verdict")
    if not all(isinstance(text, str) for text in (verdict.reason, verdict.code, verdict.param)):
        raise TypeError(f"reason, code and param of a verdict are strings, not {verdict!r}")
    status: object = verdict.status
    if verdict.state is GateState.FAILED and not (isinstance(status, int) and 400 <= status <= 599):
        raise TypeError(f"the status of a failure is from 400 to 599, not {status!r}")
    most: object = verdict.max_new_tokens
    if most is not None and not (type(most) is int and most >= 1):
        raise TypeError(f"max_new_tokens of a verdict is at least 1, not {most!r}")
    namespace: object = verdict.namespace
    if namespace is not None and not (isinstance(namespace, str) and len(namespace) <= MAX_NAMESPACE):
        raise TypeError(
            f"the namespace of a verdict is a string of at most {MAX_NAMESPACE} characters, not {namespace!r:.80}"
        )
    progress = verdict.progress
    if progress is None or (type(progress) is float and 0.0 <= progress <= 1.0):
        return verdict
    # A share that is none (or a NaN) is not worth a request: it counts as unknown. Others become plain, to be sent.
    return replace(verdict, progress=float(progress) if 0.0 <= progress <= 1.0 else None)


def timed_out(name: str, verdict: Verdict, waited: float) -> Verdict:
    """Return the failure of a request that a gate has blocked for too long."""
    done = "" if verdict.progress is None else f", {verdict.progress:.0%} done"
    text = f"not ready after {waited:.1f} s at the gate {name!r}: {verdict.reason}{done}"
    return Verdict.failed(text, status=504, code="gate_timeout")


def reason_of(verdict: Verdict) -> FinishReason:
    """Return how a request ends that a gate has failed."""
    return FinishReason(
        FinishType.ABORT, message=verdict.reason, status=verdict.status, code=verdict.code, param=verdict.param
    )


def limit(req: Req, most: int | None) -> None:
    """Allow a request no more than `most` new tokens; None: as many as it asked for."""
    params = req.sampling
    if most is not None and (params.max_new_tokens is None or params.max_new_tokens > most):
        req.sampling = structs.replace(params, max_new_tokens=most, min_new_tokens=min(params.min_new_tokens, most))


def composed(parts: Mapping[str, str], own: str) -> str:
    """Return the namespace of a request to which gates have added `parts`, by the gate's name, and whose client has
    its `own`. Two are equal only where all parts are: each is framed by its name and length, in the order of names.
    """
    return "".join(f"{name}={len(parts[name])}:{parts[name]}/" for name in sorted(parts)) + own


def move(req: Req, namespace: str) -> None:
    """Put a request that has no KV yet into another namespace."""
    if namespace == req.namespace:
        return
    req.namespace = namespace
    req.memo = PrefixMemo()  # a memo stays in one namespace
