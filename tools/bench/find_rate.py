"""The highest rate of arrivals at which a server keeps to bounds: trials, and the search among them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pegboard.core.interfaces.errors import PegboardError
from pegboard.tools.bench.figures import LATENCIES, PERCENTILES
from pegboard.tools.bench.load import Outcome, StopWhen
from pegboard.tools.bench.records import Record

IDLE = 0.2
"""Requests under way, on average: with so few a server has next to nothing to do."""
UP = 1.25
DOWN = 0.67
"""What follows a rate that was kept, and one that was not, until there are both: this, and then powers of it."""
LONGEST_STRIDE = 4
MOST_TRIALS = 24

_STATISTICS = ("mean", "max", *(f"p{p}" for p in PERCENTILES))


@dataclass(frozen=True, slots=True)
class Bound:
    """Most milliseconds of one statistic of one latency."""

    latency: str
    statistic: str
    ms: float

    @classmethod
    def parse(cls, text: str) -> tuple[Bound, ...]:
        """From ``ttft:p99:1000``; several with commas between. Raises PegboardError."""
        found = []
        for part in filter(None, text.replace(",", " ").split()):
            latency, _, rest = part.partition(":")
            statistic, _, value = rest.partition(":")
            try:
                ms = float(value)
            except ValueError:
                ms = math.nan
            if latency not in LATENCIES or statistic not in _STATISTICS or not ms > 0:
                raise PegboardError(
                    f"--find-rate: {part!r} is not a bound such as ttft:p99:1000 (ms); latencies are "
                    f"{', '.join(LATENCIES)}, statistics {', '.join(_STATISTICS)}"
                )
            found.append(cls(latency, statistic, ms))
        if not found:
            raise PegboardError("--find-rate needs a bound, such as ttft:p99:1000")
        return tuple(found)

    def __str__(self) -> str:
        return f"{self.statistic} of {self.latency.upper()} below {self.ms:g} ms"

    def broken(self, figures: dict[str, Any]) -> str:
        """Return what was more than it should be, or was not there to be measured; or ""."""
        values = figures[f"{self.latency}_ms"]
        if values is None:
            return f"no answer has a {self.latency.upper()}"
        if values[self.statistic] < self.ms:
            return ""
        return f"{self.statistic} of {self.latency.upper()} was {values[self.statistic]:.0f} ms"

    def surely_broken(self, records: Sequence[Record], total: int, now: float) -> bool:
        """Return whether it is broken whatever comes of the rest of `total` requests. Those that wait have waited so
        long.
        """
        if self.statistic == "max":
            few = 1
        elif self.statistic.startswith("p"):
            # The percentile lies at or above the value of this rank, counted from 0 in rising order.
            few = total - math.floor((total - 1) * int(self.statistic[1:]) / 100)
        else:
            return False
        return sum(_so_far(one, self.latency, now) * 1000 >= self.ms for one in records) >= few


def _so_far(record: Record, latency: str, now: float) -> float:
    """Return seconds that it has come to at least."""
    if latency == "ttft":
        return record.ttft if record.times or record.over else now - record.sent
    if latency == "e2e":
        return record.e2e if record.over else now - record.sent
    if latency == "tpot" and record.over:
        return record.tpot or 0.0
    return 0.0


def stop_early(bounds: Sequence[Bound], total: int) -> StopWhen:
    """End a trial as soon as it has failed."""

    def look(records: Sequence[Record], now: float) -> str:
        if any(one.error for one in records):
            return "a request failed"
        return next((f"not {one}" for one in bounds if one.surely_broken(records, total, now)), "")

    return look


@dataclass(slots=True)
class Trial:
    """One rate that was tried. `why` it was not kept, or ""."""

    rate: float
    why: str
    figures: dict[str, Any] = field(default_factory=dict)
    last: bool = False
    """Whether there must not be another one."""
    idle: bool = False
    """Whether the server had next to nothing to do, so that a lower rate is not easier."""

    @property
    def kept(self) -> bool:
        return not self.why

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"rate": self.rate, "why": self.why, "figures": self.figures}


def verdict(outcome: Outcome, figures: dict[str, Any], bounds: Sequence[Bound]) -> str:
    """Return why a trial has failed, or ""."""
    if outcome.stopped:
        return outcome.stopped
    if figures["failed"]:
        return f"{figures['failed']} requests failed: {figures['errors'][0]['message']}"
    return next(filter(None, (one.broken(figures) for one in bounds)), "")


async def search(
    attempt: Callable[[float], Awaitable[Trial]], guess: float, precision: float, most: int = MOST_TRIALS
) -> tuple[list[Trial], float | None]:
    """Return all trials, and the highest rate that was kept with one above it, within `precision` of it (0.05: 5%),
    that was not; None where none was kept. Away from `guess` by and by, then halving the distance on a logarithmic
    scale.
    """
    trials: list[Trial] = []
    low: float | None = None
    high: float | None = None
    rate, stride = guess, 1
    while len(trials) < most:
        trial = await attempt(rate)
        trials.append(trial)
        if trial.last or (trial.idle and not trial.kept and low is None):
            break
        if trial.kept:
            low = rate
        else:
            high = rate
        if low is None:
            rate *= DOWN**stride
            stride = min(LONGEST_STRIDE, 2 * stride)
        elif high is None:
            rate *= UP**stride
            stride = min(LONGEST_STRIDE, 2 * stride)
        elif high / low <= 1 + precision:
            break
        else:
            rate = math.sqrt(low * high)
    return trials, low
