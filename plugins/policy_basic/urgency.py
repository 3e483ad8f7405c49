"""Schedule policies that rank requests by an urgency of their own, with aging, and may preempt by it.

Aging without a clock: all waiting requests gain urgency at one rate, so the order of two of them never changes by
waiting alone. It is enough to charge each request once for how late it came. So urgency is a number that stays what it
is, and a request that was pushed out cannot wait itself past the one that took its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.plugins.policy_basic.options import PriorityOptions, SrtfOptions


class PriorityPolicy(SchedulePolicy[PriorityOptions]):
    """Larger `priority` first, and waiting counts too: one point per `aging` seconds since the request first entered
    the queue.

    The bound: a request of priority p that entered the queue at t is overtaken only by requests of a higher priority p'
    that entered it before ``t + (p' - p) * aging``. With priorities up to P it is overtaken by none that comes more
    than ``(P - p) * aging`` seconds after it, whatever else arrives. (It may still wait for those who run.)

    A request pushes out running ones that are lower by `preempt_threshold` points both in plain priority and with
    aging, the lowest first. Both are asked because each alone would go wrong: by plain priority a request could push
    out one that stands before it in the queue, which would be next again at once; by the aged one requests of the same
    priority would take turns pushing each other out. Neither difference changes while they wait or run, so who was
    pushed out never pushes back.
    """

    def __init__(self, options: PriorityOptions, ctx: SchedulePolicyContext) -> None:
        super().__init__(options, ctx)
        self.preempts = self.options.preempt
        self._point = self.options.aging or 1.0
        """A point of priority in units of `_rank`."""

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return sorted(waiting, key=self._rank)

    def victims(self, running: Sequence[Req]) -> list[Req]:
        """Return the least urgent first; of those within a point of each other the least work lost."""
        # Points are counted from the most urgent request, because the clock may begin anywhere.
        first = min(map(self._rank, running), default=0.0)
        return sorted(super().victims(running), key=lambda req: -math.floor((self._rank(req) - first) / self._point))

    def preempt(self, req: Req, running: Sequence[Req]) -> list[Req]:
        if not self.preempts:
            return []
        threshold, rank = self.options.preempt_threshold, self._rank(req)
        apart = threshold * self._point
        lower = [one for one in running if req.priority - one.priority >= threshold and self._rank(one) - rank >= apart]
        return self.victims(lower)

    def _rank(self, req: Req) -> float:
        """Return the most urgent lowest: with aging the time at which a request of priority 0 would have to come for
        it.
        """
        aging = self.options.aging
        return -req.priority if aging is None else req.timing.waiting_since - req.priority * aging


class SrtfPolicy(SchedulePolicy[SrtfOptions]):
    """Shortest remaining time first: the least work left, counted in generated tokens.

    What is left is the tokens to be generated, and those to be prefilled at `prefill_weight` each. A request that waits
    has its whole length to prefill: what the cache holds of it is not asked. Waiting counts too, `aging` tokens per
    second since the request first entered the queue: one with r tokens left that entered at t is overtaken only by
    requests with fewer, r', that entered before ``t + (r - r') / aging``.
    """

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return sorted(waiting, key=self._waiting_rank)

    def victims(self, running: Sequence[Req]) -> list[Req]:
        """Return the one with most left first."""
        return sorted(super().victims(running), key=lambda req: -self._running_rank(req))

    def _waiting_rank(self, req: Req) -> float:
        """In generated tokens, the most urgent lowest."""
        return self._running_rank(req) + self.options.prefill_weight * req.seq_len

    def _running_rank(self, req: Req) -> float:
        aging = self.options.aging
        late = 0.0 if aging is None else req.timing.waiting_since * aging
        return self._output_left(req) + late

    def _output_left(self, req: Req) -> float:
        """Return tokens it is expected to generate still: one at least, even where it outlives the expectation."""
        limit, expected = req.sampling.max_new_tokens, self.options.expected_output_tokens
        if expected is None:
            return math.inf if limit is None else max(1, limit - req.output_len)
        left = max(1, expected - req.output_len)
        return left if limit is None else min(left, max(1, limit - req.output_len))
