"""Worth: how many drafts pay, by what was accepted so far and by what verifying has cost.

A step with B requests takes t seconds and gains each of them a token. With n drafts it takes f + c n seconds more, and
gains as many tokens as they are likely to be accepted. All of these are measured as they come, on whatever machine
this is, and the drafts are chosen by which a step gains most tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIRST_GUESS, LATER_GUESS = 0.6, 0.85
"""How likely a draft is thought to be accepted before any was verified: a request's first one, and one behind another
that was accepted.
"""
GUESS_WEIGHT = 2.0
"""So many drafts the first guess counts for."""
FADING = 0.97
"""What verified drafts count for, one step later: outputs change their ways."""
NODE_SHARE = 0.3
"""What a draft is thought to cost before any was verified, in parts of the time for a request's token."""
NODE_WEIGHT, FIXED_WEIGHT = 1.0, 0.25
"""What that counts for, in squares of drafts, and the same of the guess that the first draft costs no more than others.
"""
STEP_FADING = 0.95
"""What a measured time counts for, one step later."""
FORGETTING = 0.98
"""What is known of drafts counts for, one step without any later: what did not pay is tried again now and then."""
OUTLIER = 2.0
"""A time is taken for so many times the usual one at most: machines stall."""
LEAST = 1e-9
"""Seconds that a step takes at least, whatever a coarse clock says."""
PLAIN_STEPS = 2
"""Steps without drafts that are measured before any are asked for."""
MEASURE_AGAIN = 64
"""After so many steps with drafts one without any is measured: contexts grow."""


class Acceptance:
    """How one request's drafts did: at each depth, drafts that the ones before them led to, and how many of these were
    accepted. Lists, since there are few depths and many requests.
    """

    def __init__(self, depths: int) -> None:
        self._tried = [GUESS_WEIGHT] * depths
        self._guess = [GUESS_WEIGHT * (LATER_GUESS if depth else FIRST_GUESS) for depth in range(depths)]
        self._hits = self._guess.copy()

    def chances(self) -> list[float]:
        """Return how likely each depth is reached. Called once a step: what was counted so far fades a little."""
        found, chance = [], 1.0
        tried, hits = self._tried, self._hits
        for depth, (count, good) in enumerate(zip(tried, hits, strict=True)):
            chance *= good / count
            found.append(chance)
            tried[depth] = count + (1 - FADING) * (GUESS_WEIGHT - count)
            hits[depth] = good + (1 - FADING) * (self._guess[depth] - good)
        return found

    def note(self, offered: int, accepted: int) -> None:
        """Take note that of so many drafts, `offered`, so many were accepted. A tree with branches is not as deep as it
        has drafts: what it cannot reach counts as missed, so that no more is expected of as many drafts again.
        """
        for depth in range(min(accepted + 1, offered)):
            self._tried[depth] += 1
            self._hits[depth] += depth < accepted


@dataclass(slots=True)
class _Times:
    """Of steps with one number of requests: seconds without drafts, a moving mean over `plain` steps, and how many
    steps with drafts came `since`. What these took beyond that is kept as fading sums for least squares: `weight`,
    `nodes` n and `squares` n^2, `extra` seconds y and `product` n y.
    """

    seconds: float = 0.0
    plain: int = 0
    since: int = 0
    weight: float = 0.0
    nodes: float = 0.0
    squares: float = 0.0
    extra: float = 0.0
    product: float = 0.0

    def add(self, nodes: int, extra: float) -> None:
        """Take note of a step with drafts."""
        self.since += 1
        self.weight = STEP_FADING * self.weight + 1
        self.nodes = STEP_FADING * self.nodes + nodes
        self.squares = STEP_FADING * self.squares + nodes * nodes
        self.extra = STEP_FADING * self.extra + extra
        self.product = STEP_FADING * self.product + nodes * extra

    def forget(self) -> None:
        """Let what is known of drafts fade."""
        self.weight *= FORGETTING
        self.nodes *= FORGETTING
        self.squares *= FORGETTING
        self.extra *= FORGETTING
        self.product *= FORGETTING

    def fit(self, guess: tuple[float, float]) -> tuple[float, float]:
        """Return f and c of y = f + c n, which are thought to be `guess`."""
        a, b, d = self.weight + FIXED_WEIGHT, self.nodes, self.squares + NODE_WEIGHT
        x, y = self.extra + FIXED_WEIGHT * guess[0], self.product + NODE_WEIGHT * guess[1]
        fixed = (x * d - b * y) / (a * d - b * b)
        if fixed < 0:
            return 0.0, max(0.0, y / d)
        return fixed, max(0.0, (y - b * fixed) / d)


class StepTimes:
    """Measured times of steps that only decode and verify, by their number of requests."""

    def __init__(self) -> None:
        self._times: dict[int, _Times] = {}

    def note(self, requests: int, nodes: int, seconds: float) -> None:
        """Take note of a step that has computed the next tokens of so many requests, and `nodes` drafts."""
        times = self._times.setdefault(requests, _Times())
        seconds = max(seconds, LEAST)
        if times.plain:
            fixed, node = self.drafts(requests) if nodes else (0.0, 0.0)
            seconds = min(seconds, OUTLIER * (times.seconds + fixed + node * nodes))
        if nodes:
            times.add(nodes, seconds - times.seconds)
        else:
            weight = max(1 - STEP_FADING, 1 / (times.plain + 1))
            times.seconds += weight * (seconds - times.seconds)
            times.plain, times.since = times.plain + 1, 0
            times.forget()

    def plain(self, requests: int) -> float | None:
        """Return the seconds of a step without drafts; None where one has to be measured first."""
        times = self._times.get(requests)
        if times is None or times.plain < PLAIN_STEPS or times.since >= MEASURE_AGAIN:
            return None
        return times.seconds

    def drafts(self, requests: int) -> tuple[float, float]:
        """Return the seconds that drafts take, whatever their number, and that each of them takes."""
        times = self._times[requests]
        guess = 0.0, NODE_SHARE * times.seconds / requests
        # Drafts cost about the same beside some more requests, or fewer.
        known = [size for size, one in self._times.items() if one.weight >= 1 and size != requests]
        if known:
            guess = self._times[min(known, key=lambda size: abs(size - requests))].fit(guess)
        return times.fit(guess)


@dataclass(frozen=True, slots=True)
class Worth:
    """What drafts of some requests are worth in the next step: `chances`, `plain` and `drafts` as in `worthwhile`.
    Without `plain` it has to be measured first.
    """

    chances: Sequence[Sequence[float]]
    plain: float | None
    drafts: tuple[float, float]

    def cut(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of `counts` int64 [requests] nodes, roots included, pay."""
        if self.plain is None:
            return np.ones_like(counts)
        return 1 + np.array(worthwhile(self.chances, (counts - 1).tolist(), self.plain, self.drafts), np.int64)


def worthwhile(
    chances: Sequence[Sequence[float]], most: Sequence[int], plain: float, drafts: tuple[float, float]
) -> list[int]:
    """Return how many drafts pay for each request: `chances` that each of its depths is reached, `most` drafts each at
    most. A step without drafts takes `plain` seconds; `drafts` are the seconds that they take, whatever their number,
    and that each of them takes.
    """
    found = [0] * len(chances)
    # Of one request, deeper drafts are less likely.
    values = [(chance, -index) for index, one in enumerate(chances) for chance in one[: most[index]]]
    values.sort(reverse=True)
    tokens, seconds = float(len(chances)), plain + drafts[0]
    best, count = tokens / plain, 0
    for taken, (chance, _) in enumerate(values, start=1):
        tokens, seconds = tokens + chance, seconds + drafts[1]
        if tokens / seconds > best:
            best, count = tokens / seconds, taken
    for _, index in values[:count]:
        found[-index] += 1
    return found
