"""Lost steps: for which no request is to blame, and how many of them a request may go through."""

from __future__ import annotations

from collections.abc import Iterable

from pegboard.core.interfaces.req import Req, ReqSlot

MAX_LOST_STEPS = 20
"""After so many lost steps without a new token or more KV a request is given up: more than the loads that a cache may
lose."""

_LOST: ReqSlot[list[int]] = ReqSlot(lambda: [0, 0])
"""How many steps of a request were lost in a row, and how many tokens and KV it had at the last of them."""


def lost_too_often(reqs: Iterable[Req]) -> list[Req]:
    """Count a lost step of these requests, and return those that have lost too many."""
    over = []
    for req in reqs:
        lost = _LOST.of(req)
        has = req.seq_len + req.kv.committed_len
        lost[:] = lost[0] + 1 if has == lost[1] else 1, has
        if lost[0] >= MAX_LOST_STEPS:
            over.append(req)
    return over
