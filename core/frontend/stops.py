"""The stops of requests that belong together, compiled once, beside the loop, within their budget."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pegboard.core.interfaces.stops import CompiledStops
from pegboard.toolkit.http.budget import stop_steps
from pegboard.toolkit.text.stop import Stops, compiled

if TYPE_CHECKING:
    from pegboard.core.frontend.intake import Intake
    from pegboard.core.interfaces.client import GenerateRequest
    from pegboard.core.interfaces.sampling import SamplingParams
    from pegboard.toolkit.http.budget import Budget

Spelt = tuple[tuple[str, ...], tuple[object, ...]]
"""Stop strings, and what stages compile, as they came."""

Compiled = tuple[Stops, tuple[CompiledStops, ...]]

LONG_STOPS = 64 * 1024
"""Characters of stop strings that a loop looks at within about a millisecond; with more, or with anything that stages
compile, which costs ten times as much and more, stops are checked and compiled in a thread."""


@asynccontextmanager
async def compiled_stops(requests: Sequence[GenerateRequest], intake: Intake, budget: Budget) -> AsyncIterator[None]:
    """Within it, `compiled` finds the stops of these requests. Raises InvalidRequest for those that cannot be used, and
    for more than one HTTP request may have.
    """
    several: dict[Spelt, SamplingParams] = {}
    answers: Counter[Spelt] = Counter()
    for one in requests:
        spelt = (one.sampling.stop, intake.features.spelt(one.sampling))
        if any(spelt):
            several.setdefault(spelt, one.sampling)
            answers[spelt] += 1
    length = sum(len(text) for strings, _ in several for text in strings)
    if length > LONG_STOPS or any(others for _, others in several):
        kept = await asyncio.to_thread(_compile, several, answers, intake, budget)
    else:
        kept = _compile(several, answers, intake, budget)
    try:
        yield
    finally:
        kept.clear()


def _compile(
    several: Mapping[Spelt, SamplingParams], answers: Mapping[Spelt, int], intake: Intake, budget: Budget
) -> list[Compiled]:
    """Stop with an error as soon as they are too costly, so that no more is compiled than may be used."""
    kept: list[Compiled] = []
    steps = 0
    for spelt, sampling in several.items():
        intake.check_collections(sampling)
        kept.append((compiled(sampling.stop), intake.features.compile_stops(sampling)))
        steps += stop_steps(*kept[-1], first=True) + (answers[spelt] - 1) * stop_steps(*kept[-1])
        budget.check_steps(steps)
    return kept
