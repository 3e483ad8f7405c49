"""Worth: how many drafts pay, by what was accepted so far and by what verifying has cost.

A step with B requests takes t seconds and gains each of them a token. A further node in it takes c seconds more, and
gains as many tokens as it is likely to be accepted. So it pays while that probability is above c times the tokens per
second that the step has without it. Both times are measured as they come, on whatever machine this is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIRST_GUESS = 0.6
"""How likely a draft is thought to be accepted, before any was verified."""
GUESS_WEIGHT = 2.0
"""So many drafts the first guess counts for."""
FADING = 0.97
"""What verified drafts count for, one step later: outputs change their ways."""
NODE_SHARE = 0.5
"""What a node is thought to cost before any was verified, in parts of the time for a request's token."""
STEP_FADING = 0.9
"""What a measured time counts for, one step later."""
OUTLIER = 3.0
"""A time is taken for so many times the usual one at most: machines stall."""
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
        self._hits = [GUESS_WEIGHT * FIRST_GUESS] * depths

    def chances(self) -> list[float]:
        """Return how likely each depth is reached. Called once a step: what was counted so far fades a little."""
        found, chance = [], 1.0
        tried, hits = self._tried, self._hits
        for depth, (count, good) in enumerate(zip(tried, hits, strict=True)):
            chance *= good / count
            found.append(chance)
            tried[depth] = count + (1 - FADING) * (GUESS_WEIGHT - count)
            hits[depth] = good + (1 - FADING) * (GUESS_WEIGHT * FIRST_GUESS - good)
        return found

    def note(self, offered: int, accepted: int) -> None:
        """Of drafts down to the depth `offered` so many were accepted."""
        for depth in range(min(accepted + 1, offered)):
            self._tried[depth] += 1
            self._hits[depth] += depth < accepted


@dataclass(slots=True)
class _Times:
    """Of steps with one number of requests: seconds without drafts (a moving mean over `plain` steps), and what nodes
    took beyond that, as sums that fade.
    """

    seconds: float = 0.0
    plain: int = 0
    since: int = 0
    nodes: float = 0.0
    extra: float = 0.0


class StepTimes:
    """Measured times of steps that only decode and verify, by their number of requests."""

    def __init__(self) -> None:
        self._times: dict[int, _Times] = {}

    def note(self, requests: int, nodes: int, seconds: float) -> None:
        """Take note of a step that has computed the next tokens of so many requests, and `nodes` drafts."""
        times = self._times.setdefault(requests, _Times())
        if times.plain:
            seconds = min(seconds, OUTLIER * (times.seconds + self.node(requests) * nodes))
        if nodes:
            times.since += 1
            times.nodes = STEP_FADING * times.nodes + nodes
            times.extra = STEP_FADING * times.extra + seconds - times.seconds
        else:
            weight = max(1 - STEP_FADING, 1 / (times.plain + 1))
            times.seconds += weight * (seconds - times.seconds)
            times.plain, times.since = times.plain + 1, 0

    def plain(self, requests: int) -> float | None:
        """Return the seconds of a step without drafts; None where one has to be measured first."""
        times = self._times.get(requests)
        if times is None or times.plain < PLAIN_STEPS or times.since >= MEASURE_AGAIN:
            return None
        return times.seconds

    def node(self, requests: int) -> float:
        """Return the seconds that a further node takes."""
        times = self._times[requests]
        # What is known of steps of about the same size counts as long as this one is new.
        near = max((one for size, one in self._times.items() if size.bit_length() == requests.bit_length()), key=_nodes)
        known = times if times.nodes >= 1 else near
        guess = NODE_SHARE * times.seconds / requests
        return max(0.0, (known.extra + guess) / (known.nodes + 1))


def _nodes(times: _Times) -> float:
    return times.nodes


def worthwhile(chances: Sequence[Sequence[float]], most: Sequence[int], plain: float, node: float) -> list[int]:
    """Return how many drafts pay for each request: `chances` that each of its depths is reached, `most` drafts each at
    most. A step without drafts takes `plain` seconds, and each draft `node` more.
    """
    found = [0] * len(chances)
    values = [
        (chance, -index) for index, one in enumerate(chances) for chance in one[: most[index]]
    ]  # of one request, deeper drafts are less likely
    values.sort(reverse=True)
    tokens, seconds = float(len(chances)), plain
    for chance, index in values:
        if chance * seconds <= node * tokens:
            break
        found[-index] += 1
        tokens, seconds = tokens + chance, seconds + node
    return found
