"""Schedule policies that look at the queue alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext


class FcfsPolicy(SchedulePolicy):
    """First come, first served: the queue as it stands."""

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return list(waiting)


class LofPolicy(SchedulePolicy):
    """Longest output first, by `max_new_tokens` as in SGLang: what runs longest starts first."""

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return sorted(waiting, key=_longest_output_first)


def _longest_output_first(req: Req) -> float:
    limit = req.sampling.max_new_tokens
    return -math.inf if limit is None else -limit


class RandomPolicy(SchedulePolicy[NoOptions]):
    """A new random order at every call; the engine's seed fixes the sequence of orders."""

    def __init__(self, options: NoOptions, ctx: SchedulePolicyContext) -> None:
        super().__init__(options, ctx)
        self._random = random.Random(ctx.seed)

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        shuffled = list(waiting)
        self._random.shuffle(shuffled)
        return shuffled
