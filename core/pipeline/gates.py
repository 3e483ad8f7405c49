"""GateKeeper: requests on their way through the admission gates, and finished ones that a gate still holds."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pegboard.core.interfaces.admission_gate import AdmissionGate, GateState, Verdict
from pegboard.core.interfaces.req import NO_ROW
from pegboard.core.interfaces.status import FinishReason, ReqStatus
from pegboard.core.pipeline.verdicts import late, reason_of, taken
from pegboard.core.pipeline.visits import GateNews, Post, Visit
from pegboard.toolkit.system.blame import in_words
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.admission_gate import Seat
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.req import Req

logger = logging.getLogger(__name__)

T = TypeVar("T")


class GateKeeper:
    """Leads requests through the gates in the config's order, and ends the wait of those whose time is up.

    False while no request is blocked or held, so that a step costs one look. Every call of a gate is guarded: if
    it raises, or its answer is not a verdict, the request in question fails with status 500 and the gate's name. The
    log has the traceback of the first time, and a line of each.
    """

    def __init__(
        self,
        gates: Sequence[tuple[str, AdmissionGate]],
        clock: Clock,
        provides: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        """Set posts up, with the capabilities that each gate `provides`, by name."""
        self._posts = [
            Post(
                name,
                gate,
                provides.get(name, ()),
                getattr(gate.options, "timeout", None),
                getattr(gate.options, "hold_timeout", None),
            )
            for name, gate in gates
        ]
        self.seats = any("seats" in post.provides for post in self._posts)
        """Whether some gate may ask for a place in memory."""
        self.follows = any("follows" in post.provides for post in self._posts)
        """Whether some gate wants to know what is computed."""
        self.overdue = 0
        """Held requests whose gate did not let them go in time."""
        self._watchful = [post for post in self._posts if type(post.gate).busy is not AdmissionGate.busy]
        self._clock = clock
        self._visits: dict[str, Visit] = {}
        self._busy = 0
        """Requests that are blocked or held."""

    def __bool__(self) -> bool:
        return self._busy > 0 or self.busy

    @property
    def busy(self) -> bool:
        """Whether some gate wants to be asked though it blocks and holds no request."""
        return any(post.gate.busy for post in self._watchful)

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

    def stats(self) -> dict[str, dict[str, float]]:
        """Return what the gates tell of themselves, by name."""
        found = {}
        for post in self._posts:
            try:
                told = {name: float(value) for name, value in post.gate.stats().items()}
            except Exception as error:
                self._raised(post, "stats", error)
                continue
            if told:
                found[post.name] = told
        return found

    def close(self) -> None:
        """Close the gates; none of them is called any more."""
        for post in self._posts:
            try:
                post.gate.close()
            except Exception as error:
                self._raised(post, "close", error)

    def arrive(self, req: Req) -> Verdict | None:
        """Lead a new request as far as it gets. A failure is returned, and then nothing is kept of it; otherwise the
        request is through, or its status is BLOCKED and `blocked_by` names the gate.
        """
        posts = []
        for post in self._posts:
            concerned, failure = self._ask(post, "concerns", post.gate.concerns, req)
            if failure is not None:
                return failure
            if concerned:
                posts.append(post)
        if not posts:
            return None
        visit = self._visits[req.rid] = Visit(posts, 0, self._clock(), Verdict(GateState.OPEN), req.namespace)
        verdict = self._lead(req, visit)
        return verdict if verdict.state is GateState.FAILED else None

    def poll(self) -> GateNews:
        """Return what the gates have to say now, and whose time is up."""
        news = GateNews()
        # Releases come first. What fails below may leave a seat that its gate lets go at once, and that is heard only
        # after the caller has ended the request.
        for post in self._posts:
            if post.held or (post in self._watchful and post.gate.busy):
                self._release(post, news)
        for post in self._posts:
            if post.blocked:
                self._look(post, news)
        return news

    def cancel(self, req: Req) -> bool:
        """End the wait of a blocked request that ends, whyever. Return whether its seat is still being written to; then
        `poll` tells when it is released.
        """
        visit = self._visits.get(req.rid)
        if visit is not None and not visit.quarantined:
            del self._visits[req.rid]
            self._leave(req, visit)
        return req.rid in self._visits

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
                self._hold(req, post, visit)
        if not visit.holders:
            del self._visits[req.rid]
            return False
        self._busy += 1
        return True

    def drop(self, req: Req) -> bool:
        """Let a held request go at once. False where that cannot be: it has a seat that is still written to."""
        visit = self._visits.get(req.rid)
        if visit is None:
            return True
        if visit.quarantined:
            return False
        del self._visits[req.rid]
        self._busy -= 1
        for post in visit.posts:
            if post.held.pop(req.rid, None) is not None:
                self._ask(post, "drop", post.gate.drop, req)
        return True

    # ---- memory ---------------------------------------------------------------------------------------------------

    def asking(self) -> list[Req]:
        """Return the blocked requests that want a seat and have none, those first that came first."""
        return [
            req
            for post in self._posts
            if "seats" in post.provides
            for req in post.blocked.values()
            if req.kv.row == NO_ROW and self._visits[req.rid].verdict.seat
        ]

    def seated(self, req: Req, seat: Seat) -> FinishReason | None:
        """Give a gate the seat that it asked for; why the request ends, where the gate raised."""
        visit = self._visits[req.rid]
        post = visit.posts[visit.passed]
        _, failure = self._ask(post, "seated", functools.partial(post.gate.seated, seat=seat), req)
        return None if failure is None else reason_of(failure)

    def computed(self, req: Req, slots: NDArray[np.int32]) -> FinishReason | None:
        """Tell the gates that follow a request where its KV is now; why it ends, where one of them raised."""
        visit = self._visits[req.rid]
        visit.followed = True
        failed = None
        for post in visit.posts:
            if "follows" in post.provides:
                _, failure = self._ask(post, "computed", functools.partial(post.gate.computed, slots=slots), req)
                failed = failed or failure
        return None if failed is None else reason_of(failed)

    def is_followed(self, req: Req) -> bool:
        """Return whether a gate that the request has passed wants to know what is computed of it."""
        visit = self._visits.get(req.rid)
        return visit is not None and any("follows" in post.provides for post in visit.posts)

    def leaving(self, req: Req) -> None:
        """Tell the gates that a request's memory is about to be taken from it."""
        visit = self._visits.get(req.rid)
        if visit is not None and visit.followed:
            self.computed(req, np.empty(0, np.int32))
            visit.followed = False

    @property
    def quarantined(self) -> list[Req]:
        """Requests that have ended and whose seats are still written to."""
        return [req for post in self._posts for req in post.held.values() if self._visits[req.rid].quarantined]

    # ---- on the way -----------------------------------------------------------------------------------------------

    def _lead(self, req: Req, visit: Visit) -> Verdict:
        """On to the first gate that is not open. A request that fails leaves all gates that it has seen."""
        while visit.passed < len(visit.posts):
            post = visit.posts[visit.passed]
            visit.verdict = verdict = self._enter(post, req, visit)
            if verdict.state is GateState.BLOCKED:
                self._block(req, post, visit)
                return verdict
            if verdict.state is GateState.FAILED:
                del self._visits[req.rid]
                self._leave(req, visit)
                return verdict
            visit.passed += 1
        return visit.verdict

    def _enter(self, post: Post, req: Req, visit: Visit) -> Verdict:
        try:
            return taken(post.gate.enter(req), req, visit, post.name)
        except Exception as error:
            return self._raised(post, "enter", error, req.name)

    def _block(self, req: Req, post: Post, visit: Visit) -> None:
        if req.status is not ReqStatus.BLOCKED:
            req.move_to(ReqStatus.BLOCKED)
            self._busy += 1
        req.blocked_by = post.name
        post.blocked[req.rid] = req
        visit.since = self._clock()

    def _leave(self, req: Req, visit: Visit) -> None:
        """Tell every gate that knows a request which is not going to run."""
        if req.blocked_by:
            self._busy -= 1
        for post in visit.posts[: visit.passed + 1]:
            post.blocked.pop(req.rid, None)
            still, _ = self._ask(post, "cancel", post.gate.cancel, req)
            if still is True and "seats" in post.provides and req.kv.row != NO_ROW:
                self._hold(req, post, visit)
        if visit.holders:
            visit.quarantined = True
            self._visits[req.rid] = visit
            self._busy += 1

    def _look(self, post: Post, news: GateNews) -> None:
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
                visit.verdict = self._examined(post, req, visit, verdicts[req.rid])
            if visit.verdict.state is GateState.OPEN:
                self._pass(req, post, visit, news)
            elif visit.verdict.state is GateState.FAILED:
                self._fail(req, visit, visit.verdict, news)
            elif post.timeout is not None and (waited := now - visit.since) >= post.timeout:
                self._fail(req, visit, late(post.name, visit.verdict, waited), news)

    def _examined(self, post: Post, req: Req, visit: Visit, verdict: object) -> Verdict:
        try:
            return taken(verdict, req, visit, post.name)
        except Exception as error:
            return self._raised(post, "poll", error, req.name)

    def _pass(self, req: Req, post: Post, visit: Visit, news: GateNews) -> None:
        del post.blocked[req.rid]
        arrived = visit.verdict.arrived
        visit.passed += 1
        verdict = self._lead(req, visit)
        if verdict.state is GateState.FAILED:
            news.failed.append((req, reason_of(verdict)))
        elif verdict.state is GateState.OPEN:
            self._busy -= 1
            req.blocked_by = ""
            news.ready.append((req, arrived))

    def _fail(self, req: Req, visit: Visit, verdict: Verdict, news: GateNews) -> None:
        del self._visits[req.rid]
        self._leave(req, visit)
        news.failed.append((req, reason_of(verdict)))

    def _release(self, post: Post, news: GateNews) -> None:
        try:
            free = [rid for rid in dict.fromkeys(post.gate.released()) if rid in post.held]
        except Exception as error:
            self._raised(post, "released", error)
            # It may never name them, and KV that is never freed is lost. So they go, but for seats under a writer.
            free = [rid for rid in post.held if not self._visits[rid].quarantined]
            for rid in free:
                self._ask(post, "drop", post.gate.drop, post.held[rid])
        free += [rid for rid in self._overdue(post) if rid not in free]
        for rid in free:
            req = post.held.pop(rid)
            visit = self._visits[rid]
            visit.holders.discard(post.name)
            if not visit.holders:
                del self._visits[rid]
                self._busy -= 1
                news.released.append(req)

    def _hold(self, req: Req, post: Post, visit: Visit) -> None:
        post.held[req.rid] = req
        visit.holders.add(post.name)
        visit.since = self._clock()

    def _overdue(self, post: Post) -> list[str]:
        """Return those that a gate has held for too long, and tell of them. A seat that is still written to is never
        among them: its pages would be given away under the writer.
        """
        if post.hold_timeout is None:
            return []
        since = self._clock() - post.hold_timeout
        found = [req for rid, req in post.held.items() if self._visits[rid].since <= since]
        for req in found:
            visit = self._visits[req.rid]
            self.overdue += 1
            if visit.quarantined:
                visit.since = float("inf")
                logger.error("the seat of %s is still written to; its memory is lost until that ends", quoted(req.name))
            else:
                logger.warning("the gate %r has held %s for too long; it is released", post.name, quoted(req.name))
                self._ask(post, "drop", post.gate.drop, req)
        return [req.rid for req in found if not self._visits[req.rid].quarantined]

    # ---- guards ---------------------------------------------------------------------------------------------------

    def _ask(self, post: Post, what: str, call: Callable[[Req], T], req: Req) -> tuple[T | None, Verdict | None]:
        """Return a gate's answer about one request, or the failure that its exception makes of it."""
        try:
            return call(req), None
        except Exception as error:
            return None, self._raised(post, what, error, req.name)

    def _raised(self, post: Post, what: str, error: Exception, name: str = "") -> Verdict:
        post.failures += 1
        trace = None if what in post.known else error
        post.known.add(what)
        whose = f" of {quoted(name)}" if name else ""
        told = in_words(error)
        logger.error("the gate %r failed in %s%s: %s", post.name, what, whose, told, exc_info=trace)
        return Verdict.failed(f"the gate {post.name!r} failed: {told}", status=500, code="gate_failed")
