"""A limit of the rate for each API key. It concerns every request, whatever that says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces import OPEN, AdmissionGate, Verdict

from pegboard_example_plugin.options import RateLimitOptions

if TYPE_CHECKING:
    from pegboard.core.interfaces import AdmissionGateContext, Req


@dataclass(slots=True)
class Bucket:
    """What one key may still do: a request takes a token, and time brings new ones."""

    tokens: float
    at: float
    waiting: int = 0


class RateLimit(AdmissionGate[RateLimitOptions]):
    """A token bucket for each key. Without keys, all requests share one.

    Requests that wait pass in the order in which they came, and so does one that comes while others of its key wait.
    """

    def __init__(self, options: RateLimitOptions, ctx: AdmissionGateContext) -> None:
        super().__init__(options, ctx)
        self._buckets: dict[str, Bucket] = {}
        """By name of the key; a server has a handful of them, so they stay."""
        self._waiting: set[str] = set()

    def concerns(self, req: Req) -> bool:
        return True

    def enter(self, req: Req) -> Verdict:
        bucket = self._bucket(req)
        if not bucket.waiting and self._take(bucket):
            return OPEN
        if bucket.waiting >= self.options.waiting:
            text = f"this key may send {self.options.per_second:g} requests per second; try again later"
            return Verdict.failed(text, status=429, code="rate_limit_exceeded")
        bucket.waiting += 1
        self._waiting.add(req.rid)
        return Verdict.blocked(f"its key's rate of {self.options.per_second:g} requests per second")

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        news = {}
        for req in blocked:
            if self._take(self._bucket(req)):
                self._forget(req)
                news[req.rid] = OPEN
        return news

    def cancel(self, req: Req) -> None:
        self._forget(req)

    def _forget(self, req: Req) -> None:
        """It waits no more. Of a request that does not wait, nothing is kept."""
        if req.rid in self._waiting:
            self._waiting.remove(req.rid)
            self._bucket(req).waiting -= 1

    def _bucket(self, req: Req) -> Bucket:
        found = self._buckets.get(req.principal)
        if found is None:
            found = self._buckets[req.principal] = Bucket(float(self.options.burst), self.ctx.clock())
        return found

    def _take(self, bucket: Bucket) -> bool:
        now = self.ctx.clock()
        gained = (now - bucket.at) * self.options.per_second
        bucket.tokens = min(float(self.options.burst), bucket.tokens + gained)
        bucket.at = now
        if bucket.tokens < 1.0:
            return False
        bucket.tokens -= 1.0
        return True
