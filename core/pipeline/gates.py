"""GateKeeper: requests on their way through the admission gates, and finished ones that a gate still holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from pegboard.core.interfaces.admission_gate import GateState, Verdict
from pegboard.core.interfaces.status import FinishReason, FinishType, ReqStatus
from pegboard.core.registry.blame import in_words
from pegboard.core.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from pegboard.core.interfaces.admission_gate import AdmissionGate
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.req import Req

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class GateNews:
    """What has changed since the last step: requests that may enter the queue, ones that failed, ones held no more."""

    ready: list[Req] = field(default_factory=list)
    failed: list[tuple[Req, FinishReason]] = field(default_factory=list)
    released: list[Req] = field(default_factory=list)


@dataclass(slots=True)
class _Post:
    """One gate under its name, with the requests that it blocks and holds, by rid."""

    name: str
    gate: AdmissionGate
    timeout: float | None
    blocked: dict[str, Req] = field(default_factory=dict)
    held: dict[str, Req] = field(default_factory=dict)
    failures: int = 0
    known: set[str] = field(default_factory=set)
    """Calls that have raised before, whose traceback is in the log."""


@dataclass(slots=True)
class _Visit:
    """A request on its way: the posts that concern it, how many of them it has passed, and where it stands."""

    posts: list[_Post]
    passed: int
    since: float
    verdict: Verdict
    holders: set[str] = field(default_factory=set)


class GateKeeper:
    """Leads requests through the gates in the config's order, and ends the wait of those whose time is up.

    False while no request is blocked or held, so that a step costs one look. Every call of a gate is guarded: if
    it raises, or its answer is not a verdict, the request in question fails with status 500 and the gate's name. The
    log has the traceback of the first time, and a line of each.
    """

    def __init__(self, gates: Sequence[tuple[str, AdmissionGate]], clock: Clock) -> None:
        self._posts = [_Post(name, gate, getattr(gate.options, "timeout", None)) for name, gate in gates]
        self._clock = clock
        self._visits: dict[str, _Visit] = {}
        self._busy = 0
        """Requests that are blocked or held."""

    def __bool__(self) -> bool:
        return self._busy > 0

    @property
    def blocked(self) -> int:
        return sum(len(post.blocked) for post in self._posts)

    @property
    def held(self) -> int:
        return len({rid for post in self._posts for rid in post.held})

    @property
    def failures(self) -> int:
        """Calls of gates that raised, since the start."""
        return sum(post.failures for post in self._posts)

    @property
    def failures_by(self) -> dict[str, int]:
        """`failures` of each gate, by name."""
        return {post.name: post.failures for post in self._posts}

    def waiting_on(self) -> list[dict[str, object]]:
        """Blocked requests, for operators: rid, gate, reason, progress (None: unknown) and seconds so far."""
        now = self._clock()
        return [
            {
                "rid": rid,
                "gate": post.name,
                "reason": visit.verdict.reason,
                "progress": visit.verdict.progress,
                "seconds": now - visit.since,
            }
            for post in self._posts
            for rid in post.blocked
            if (visit := self._visits.get(rid)) is not None
        ]

    def arrive(self, req: Req) -> Verdict | None:
        """Lead a new request as far as it gets. A failure is returned, and then nothing is kept of it; otherwise the
        request is through, or its status is BLOCKED and `blocked_by` names the gate.
        """
        if not self._posts:
            return None
        posts = []
        for post in self._posts:
            concerned, failure = self._ask(post, "concerns", post.gate.concerns, req)
            if failure is not None:
                return failure
            if concerned:
                posts.append(post)
        if not posts:
            return None
        visit = self._visits[req.rid] = _Visit(posts, 0, self._clock(), Verdict(GateState.OPEN))
        verdict = self._lead(req, visit)
        return verdict if verdict.state is GateState.FAILED else None

    def poll(self) -> GateNews:
        """Return what the gates have to say now, and whose time is up."""
        news = GateNews()
        for post in self._posts:
            if post.blocked:
                self._look(post, news)
            if post.held:
                self._release(post, news)
        return news

    def cancel(self, req: Req) -> None:
        """End the wait of a blocked request that ends for a reason of its own."""
        visit = self._visits.pop(req.rid, None)
        if visit is not None:
            self._leave(req, visit)

    def finish(self, req: Req) -> bool:
        """Tell the gates that a request which was through has ended. Return whether one of them holds it; its status is
        then the caller's to set.
        """
        visit = self._visits.get(req.rid)
        if visit is None:
            return False
        for post in visit.posts:
            holds, failure = self._ask(post, "finished", post.gate.finished, req)
            if holds and failure is None:
                post.held[req.rid] = req
                visit.holders.add(post.name)
        if not visit.holders:
            del self._visits[req.rid]
            return False
        self._busy += 1
        return True

    def drop(self, req: Req) -> None:
        """Let a held request go at once."""
        visit = self._visits.pop(req.rid, None)
        if visit is None:
            return
        self._busy -= 1
        for post in visit.posts:
            if post.held.pop(req.rid, None) is not None:
                self._ask(post, "drop", post.gate.drop, req)

    # ---- on the way -----------------------------------------------------------------------------------------------

    def _lead(self, req: Req, visit: _Visit) -> Verdict:
        """On to the first gate that is not open. A request that fails leaves all gates that it has seen."""
        while visit.passed < len(visit.posts):
            post = visit.posts[visit.passed]
            visit.verdict = verdict = self._enter(post, req)
            if verdict.state is GateState.BLOCKED:
                self._block(req, post, visit)
                return verdict
            if verdict.state is GateState.FAILED:
                del self._visits[req.rid]
                self._leave(req, visit)
                return verdict
            visit.passed += 1
        return visit.verdict

    def _enter(self, post: _Post, req: Req) -> Verdict:
        try:
            return _checked(post.gate.enter(req))
        except Exception as error:
            return self._raised(post, "enter", error, req.name)

    def _block(self, req: Req, post: _Post, visit: _Visit) -> None:
        if req.status is not ReqStatus.BLOCKED:
            req.move_to(ReqStatus.BLOCKED)
            self._busy += 1
        req.blocked_by = post.name
        post.blocked[req.rid] = req
        visit.since = self._clock()

    def _leave(self, req: Req, visit: _Visit) -> None:
        """Tell every gate that knows a request which is not going to run."""
        if req.status is ReqStatus.BLOCKED:
            self._busy -= 1
        for post in visit.posts[: visit.passed + 1]:
            post.blocked.pop(req.rid, None)
            self._ask(post, "cancel", post.gate.cancel, req)

    def _look(self, post: _Post, news: GateNews) -> None:
        waiting = list(post.blocked.values())
        try:
            verdicts = dict(post.gate.poll(waiting))
        except Exception as error:
            # It does not say which request it is about, so it is about all of them.
            failure = self._raised(post, "poll", error)
            verdicts = {req.rid: failure for req in waiting}
        now = self._clock()
        for req in waiting:
            visit = self._visits[req.rid]
            if req.rid in verdicts:
                visit.verdict = self._examined(post, req, verdicts[req.rid])
            if visit.verdict.state is GateState.OPEN:
                self._pass(req, post, visit, news)
            elif visit.verdict.state is GateState.FAILED:
                self._fail(req, visit, visit.verdict, news)
            elif post.timeout is not None and now - visit.since >= post.timeout:
                self._fail(req, visit, _late(post, visit, now), news)

    def _examined(self, post: _Post, req: Req, verdict: object) -> Verdict:
        try:
            return _checked(verdict)
        except Exception as error:
            return self._raised(post, "poll", error, req.name)

    def _pass(self, req: Req, post: _Post, visit: _Visit, news: GateNews) -> None:
        del post.blocked[req.rid]
        visit.passed += 1
        verdict = self._lead(req, visit)
        if verdict.state is GateState.FAILED:
            news.failed.append((req, _reason(verdict)))
        elif verdict.state is GateState.OPEN:
            self._busy -= 1
            req.blocked_by = ""
            news.ready.append(req)

    def _fail(self, req: Req, visit: _Visit, verdict: Verdict, news: GateNews) -> None:
        del self._visits[req.rid]
        self._leave(req, visit)
        news.failed.append((req, _reason(verdict)))

    def _release(self, post: _Post, news: GateNews) -> None:
        try:
            free = [rid for rid in dict.fromkeys(post.gate.released()) if rid in post.held]
        except Exception as error:
            self._raised(post, "released", error)
            # It will never name them, and KV that is never freed is lost. So they go, and it is told.
            free = list(post.held)
            for req in post.held.values():
                self._ask(post, "drop", post.gate.drop, req)
        for rid in free:
            req = post.held.pop(rid)
            visit = self._visits[rid]
            visit.holders.discard(post.name)
            if not visit.holders:
                del self._visits[rid]
                self._busy -= 1
                news.released.append(req)

    # ---- guards ---------------------------------------------------------------------------------------------------

    def _ask(self, post: _Post, what: str, call: Callable[[Req], T], req: Req) -> tuple[T | None, Verdict | None]:
        """Return a gate's answer about one request, or the failure that its exception makes of it."""
        try:
            return call(req), None
        except Exception as error:
            return None, self._raised(post, what, error, req.name)

    def _raised(self, post: _Post, what: str, error: Exception, name: str = "") -> Verdict:
        post.failures += 1
        trace = None if what in post.known else error
        post.known.add(what)
        whose = f" of {quoted(name)}" if name else ""
        told = in_words(error)
        logger.error("the gate %r failed in %s%s: %s", post.name, what, whose, told, exc_info=trace)
        return Verdict.failed(f"the gate {post.name!r} failed: {told}", status=500, code="gate_failed")


def _checked(verdict: object) -> Verdict:
    """Return the verdict, fit to be compared, counted and sent. Raises TypeError for what is none."""
    if not isinstance(verdict, Verdict) or not isinstance(verdict.state, GateState):
        raise TypeError(f"it answered {verdict!r}, which is not a verdict")
    if not all(isinstance(text, str) for text in (verdict.reason, verdict.code, verdict.param)):
        raise TypeError(f"reason, code and param of a verdict are strings, not {verdict!r}")
    status: object = verdict.status
    if verdict.state is GateState.FAILED and not (isinstance(status, int) and 400 <= status <= 599):
        raise TypeError(f"the status of a failure is from 400 to 599, not {status!r}")
    progress = verdict.progress
    if progress is None or (type(progress) is float and 0.0 <= progress <= 1.0):
        return verdict
    # A share that is none (or a NaN) is not worth a request: it counts as unknown. Others become plain, to be sent.
    return replace(verdict, progress=float(progress) if 0.0 <= progress <= 1.0 else None)


def _late(post: _Post, visit: _Visit, now: float) -> Verdict:
    done = "" if visit.verdict.progress is None else f", {visit.verdict.progress:.0%} done"
    text = f"not ready after {now - visit.since:.1f} s at the gate {post.name!r}: {visit.verdict.reason}{done}"
    return Verdict.failed(text, status=504, code="gate_timeout")


def _reason(verdict: Verdict) -> FinishReason:
    return FinishReason(
        FinishType.ABORT, message=verdict.reason, status=verdict.status, code=verdict.code, param=verdict.param
    )
