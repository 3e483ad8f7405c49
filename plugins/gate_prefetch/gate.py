"""Requests wait, for a while, for what storages have of their prompts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.admission_gate import OPEN, AdmissionGate, AdmissionGateContext, GateState, Verdict
from pegboard.core.interfaces.status import ReqStatus
from pegboard.plugins.gate_prefetch.options import PrefetchGateOptions
from pegboard.plugins.kv_tiers.api import Prefetching

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.kv_tiers.api import Prefetch

logger = logging.getLogger(__name__)

UNKNOWN_SPEED = 4096.0
"""Tokens per second that `auto` counts on before a prompt was computed."""
NOT_ADMITTED = {ReqStatus.BLOCKED, ReqStatus.WAITING}


@dataclass
class _Visit:
    """A request's prefetch: when it began, what of the prompt was there then, and when something came last."""

    req: Req
    prefetch: Prefetch
    since: float
    first: int
    tokens: int
    news: float


class PrefetchGate(AdmissionGate[PrefetchGateOptions]):
    """Begins to prefetch when a request comes, and lets it go on when all has come, or its time is up.

    A tier can only fail to help: whatever goes wrong opens the gate. What is still to come when a request has stopped
    waiting for it, or has been admitted, is not wanted any more.
    """

    def __init__(self, options: PrefetchGateOptions, ctx: AdmissionGateContext) -> None:
        super().__init__(options, ctx)
        self._visits: dict[str, _Visit] = {}
        """Of requests that wait here, and under `best_effort` of those that have not been admitted yet."""
        self._failing = False

    @classmethod
    def supports(cls, options: PrefetchGateOptions, ctx: AdmissionGateContext) -> str | None:
        cache: object = ctx.cache
        return None if isinstance(cache, Prefetching) else "there is no prefix cache here that could prefetch"

    def concerns(self, req: Req) -> bool:
        return req.input_len >= self.options.threshold

    def enter(self, req: Req) -> Verdict:
        self._leave_admitted()
        self._close(req)
        cache: object = self.ctx.cache
        if not isinstance(cache, Prefetching):
            return OPEN
        now = self.ctx.clock()
        try:
            prefetch = cache.prefetch(req.matchable_key())
        except Exception as error:
            self._failed(error)
            return OPEN
        visit = self._visits[req.rid] = _Visit(req, prefetch, now, 0, 0, now)
        try:
            visit.first = visit.tokens = prefetch.tokens
        except Exception as error:
            return self._given_up(visit, error)
        verdict = self._verdict(visit)
        # Under `best_effort` it goes on, for as long as the request waits for its turn.
        return OPEN if self.options.policy == "best_effort" else verdict

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        self._leave_admitted()
        return {req.rid: self._verdict(self._visits[req.rid]) for req in blocked if req.rid in self._visits}

    def cancel(self, req: Req) -> None:
        self._close(req)

    def finished(self, req: Req) -> bool:
        self._close(req)
        return False

    def _verdict(self, visit: _Visit) -> Verdict:
        """Return what there is to say now; the prefetch is closed where the request need not wait for it."""
        try:
            verdict = self._look(visit)
        except Exception as error:
            return self._given_up(visit, error)
        if verdict.state is GateState.OPEN:
            self._close(visit.req)
        return verdict

    def _look(self, visit: _Visit) -> Verdict:
        prefetch, now = visit.prefetch, self.ctx.clock()
        done, tokens, wanted = prefetch.done, prefetch.tokens, prefetch.wanted
        if tokens > visit.tokens:
            visit.tokens, visit.news = tokens, now
        if done or now - visit.news >= self.options.stall or now - visit.since >= self._limit(visit, wanted):
            return OPEN
        if wanted is None:
            return Verdict.blocked("looking for what storages have of the prompt")
        came, coming = tokens - visit.first, max(1, wanted - visit.first)
        share = min(1.0, max(0.0, came / coming))
        return Verdict.blocked(f"{came} of {wanted - visit.first} tokens have come from storages", share)

    def _limit(self, visit: _Visit, wanted: int | None) -> float:
        """Return the seconds that a request may wait in all."""
        if self.options.policy != "timeout":
            return float("inf")
        limit, length = self.options.limit, visit.req.input_len
        if limit == "auto":
            coming = (length if wanted is None else wanted) - visit.first
            return max(0, coming) / (self.ctx.prefill_speed() or UNKNOWN_SPEED)
        return min(limit.max, limit.base + limit.per_1024 * length / 1024)

    def _leave_admitted(self) -> None:
        """Close what was begun for requests that are being computed by now."""
        if self.options.policy == "best_effort":
            for visit in [one for one in self._visits.values() if one.req.status not in NOT_ADMITTED]:
                self._close(visit.req)

    def _close(self, req: Req) -> None:
        visit = self._visits.pop(req.rid, None)
        if visit is None:
            return
        try:
            visit.prefetch.close()
        except Exception as error:
            self._failed(error)

    def _given_up(self, visit: _Visit, error: Exception) -> Verdict:
        self._failed(error)
        self._close(visit.req)
        return OPEN

    def _failed(self, error: Exception) -> None:
        """Say it once in full."""
        logger.warning("nothing is prefetched: %r", error, exc_info=None if self._failing else error)
        self._failing = True
