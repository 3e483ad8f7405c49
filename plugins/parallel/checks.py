"""What does not work on several ranks, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.stage import Stage
from pegboard.toolkit.system.taking_part import takes_part

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pegboard.core.interfaces.followers import FollowersContext


def check(ctx: FollowersContext, tensor: int, pipeline: int, timeout: float) -> None:
    """Raise ConfigError, naming all that cannot be on so many ranks, each of which may be silent for `timeout`
    seconds.
    """
    key, size = "parallel.tensor" if tensor > 1 else "parallel.pipeline", tensor * pipeline
    problems = [Problem(key, f"{what}, which does not work on {size} ranks; {remedy}") for what, remedy in _unable(ctx)]
    if pipeline > 1 and (lacking := ctx.lacking("sections")):
        text = f"the {lacking} was chosen, which does not work with {pipeline} sections of layers"
        problems.append(Problem("parallel.pipeline", f"{text}; choose one with the capability `sections`"))
    if timeout > ctx.watchdog_timeout / 2:
        problems.append(
            Problem(
                "parallel.timeout",
                f"{timeout:g} s is more than half of scheduler.watchdog_timeout, {ctx.watchdog_timeout:g} s: a step "
                f"that waits for a silent rank would end before that rank is named; set it to "
                f"{ctx.watchdog_timeout / 2:g} or less, or raise the other",
            )
        )
    if problems:
        raise ConfigError(problems)


def _unable(ctx: FollowersContext) -> Iterator[tuple[str, str]]:
    if lacking := ctx.lacking("ranks"):
        yield f"the {lacking} was chosen", "choose one with the capability `ranks`"
    for stage in ctx.stages:
        if stage.splits:
            yield f"the stage {stage.name!r} splits prefills", "switch it off"
        if takes_part(Stage, stage, "ahead"):
            yield f"the stage {stage.name!r} brings tokens ahead", "switch it off"
    for part in ctx.parts:
        if part.payload is None and not part.loads:
            yield f"the stage {part.name!r} computes beside the model", "switch it off"
    for name, provides in ctx.offers.get("prefix_cache", ())[:1]:
        if "host_tier" in provides:
            yield f"the prefix cache {name!r} keeps KV beyond the device", "choose another prefix_cache.use"
    for name, provides in ctx.offers.get("admission_gate", ()):
        if "brings_kv" in provides:
            yield f"the gate {name!r} brings KV from elsewhere", "take it out of `gates`"
