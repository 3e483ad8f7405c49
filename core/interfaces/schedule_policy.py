"""Contract: which request is next, and which has to give way."""

from __future__ import annotations

import abc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.options import Component, OptionsT

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.prefix_cache import PrefixCache
    from pegboard.core.interfaces.req import Req


@dataclass(frozen=True, slots=True)
class SchedulePolicyContext:
    """The prefix cache (to be read with `matched_length` or `match`, never changed), the engine's seed for policies
    that draw lots, and the clock that `Req.timing` is written by.

    The clock is the only time there is: ask it at each call, and only to compare it with `Req.timing`. It may begin
    anywhere, and in a simulation it has nothing to do with the machine's.
    """

    cache: PrefixCache
    seed: int = 0
    clock: Clock = time.monotonic


class SchedulePolicy(Component[OptionsT, SchedulePolicyContext]):
    """Orders the waiting queue and picks victims. Reads requests; keeps own state in a ReqSlot.

    It is asked in every step, with thousands of requests at times: a call's cost grows about as the queue does, and not
    with its square. It holds no request, and nothing about one, for longer than the request is waiting or running; what
    it has of the last queue may stay until the next call. A request's `params` are what its client sent, so anything.
    """

    preempts = False
    """Whether `preempt` may name any request; without it a full engine does not order its queue."""

    @abc.abstractmethod
    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        """Return the waiting requests, each exactly once, most urgent first, in a list of its own. Ties keep the order
        that they have in `waiting` (by arrival at the queue, after retracted requests): their ids, hashes and places in
        memory decide nothing. Changes neither argument.

        A policy reads what a request says to it in ``req.params[<the provider's name>]``, and bears anything there: it
        cannot refuse a request, so what it cannot read counts as not said.

        A retracted request is waiting again: `timing.queued` is new then, `timing.ready` is not. Equal requests and
        times and an equal seed give the same order in every process.
        """

    def victims(self, running: Sequence[Req]) -> list[Req]:
        """Return the running requests, each exactly once, the first to be retracted first.

        The default follows SGLang: fewest generated tokens first (least work lost), and of these the longest prompt
        first.
        """
        return sorted(running, key=lambda req: (req.output_len, -req.input_len))

    def preempt(self, req: Req, running: Sequence[Req]) -> list[Req]:
        """Return running requests that `req` may push out, the first to go first; asked when `req` is next and does not
        fit.

        They are retracted one by one only if enough of them make room for it; otherwise none is. Empty by default:
        the running requests may go on.
        """
        return []

    def stats(self) -> dict[str, float]:
        """Return what the policy has to tell of itself, as totals since the start (how often it fell back, say)."""
        return {}
