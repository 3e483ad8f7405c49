"""What the prefill side keeps of rooms that have no request: those that are wanted early, and those that have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from pegboard.plugins.disagg.answers import Answer
from pegboard.plugins.disagg.messages import RoomKey
from pegboard.plugins.disagg.prefill_room import Claim, Question

WANT_WAITS = 50.0
"""Seconds that a decode server's question waits for its request. Less than the default of decode's `timeout`, also
after a slow connection: so decode hears `no_request`, which says more than that its time is up.
"""
REMEMBERED = 60.0
"""Seconds for which it is known how a room has ended, at least."""
MAX_PAST = 4096
"""Rooms that are remembered so; then the oldest are forgotten."""


class Questions:
    """Questions of rooms whose request has not come yet, `most` of them. A decode server may have as many places as it
    leaves to others, so that one alone has half of them, and others always find some.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._standing: dict[RoomKey, Question] = {}
        self._by: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._standing)

    def __iter__(self) -> Iterator[Question]:
        return iter(self._standing.values())

    def get(self, key: RoomKey) -> Question | None:
        return self._standing.get(key)

    def put(self, key: RoomKey, question: Question) -> bool:
        """Keep a question, in the place of the one that stands. Return whether there was a place."""
        before = self.pop(key)
        if before is None and self._by[question.instance] >= self._most - len(self._standing):
            return False
        self._standing[key] = question
        self._by[question.instance] += 1
        return True

    def pop(self, key: RoomKey) -> Question | None:
        question = self._standing.pop(key, None)
        if question is not None:
            self._by[question.instance] -= 1
            if not self._by[question.instance]:
                del self._by[question.instance]
        return question

    def expire(self, now: float, grace: float) -> list[tuple[RoomKey, Question]]:
        """Forget those of whom nothing was heard for `grace`, and return those that have waited for too long."""
        lost = [key for key, one in self._standing.items() if one.lost is not None and now - one.lost >= grace]
        for key in lost:
            self.pop(key)
        late = [(key, one) for key, one in self._standing.items() if now - one.since >= WANT_WAITS]
        for key, _ in late:
            self.pop(key)
        return late


class Ended(NamedTuple):
    """How a room ended: who had asked for it, None where it was not asked for; in which epoch it was taken, or what is
    said of it.
    """

    claim: Claim | None
    epoch: int
    answer: Answer | None
    until: float


class Past:
    """Rooms that have ended, for a decode server that has not heard of it. It asks again when it can."""

    def __init__(self, hold: float) -> None:
        self._seconds = max(REMEMBERED, hold)
        self._ended: dict[RoomKey, Ended] = {}

    def get(self, key: RoomKey) -> Ended | None:
        return self._ended.get(key)

    def forget(self, key: RoomKey) -> None:
        self._ended.pop(key, None)

    def taken(self, key: RoomKey, claim: Claim, epoch: int, now: float) -> None:
        self._put(key, Ended(claim, epoch, None, now + self._seconds))

    def failed(self, key: RoomKey, claim: Claim | None, answer: Answer, now: float) -> None:
        self._put(key, Ended(claim, 0, answer, now + self._seconds))

    def expire(self, now: float) -> None:
        while self._ended and next(iter(self._ended.values())).until <= now:
            del self._ended[next(iter(self._ended))]

    def _put(self, key: RoomKey, ended: Ended) -> None:
        self._ended.pop(key, None)
        self._ended[key] = ended
        while len(self._ended) > MAX_PAST:
            del self._ended[next(iter(self._ended))]
