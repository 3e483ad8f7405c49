"""``pegboard plugins pipeline``: every point at which plugins take part, and who is in it for a config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pegboard.core.cli.config import Files, Overrides, composed
from pegboard.toolkit.system.output import write_json, write_table

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.interfaces.frontend import FrontendStage
    from pegboard.core.interfaces.stage import DevicePart, Stage
    from pegboard.core.registry.hooks import Hooks

_COST = "one truth test where no stage overrides it"


@dataclass(frozen=True, slots=True)
class Listener:
    """One that takes part: its plugin, and the class that does."""

    plugin: str
    name: str


@dataclass(frozen=True, slots=True)
class ShownPoint:
    """A point with those who take part, in the order in which they are called."""

    point: str
    process: str
    when: str
    cost: str
    listeners: tuple[Listener, ...]


def points_of(resolved: ResolvedConfig) -> list[ShownPoint]:
    """Return every point in the order of an engine's life and of a step, those of stages last. Providers are chosen
    for that, and no weights are read. Raises as starting an engine does.
    """
    from pegboard.core.interfaces.hooks import POINTS
    from pegboard.core.registry.hooks import Hooks

    hooks = Hooks.load(resolved.registry, resolved.plugin_options)
    found = [
        ShownPoint(
            point.name,
            point.process,
            point.when,
            point.cost,
            tuple(Listener(*who) for who in hooks.listeners(point.name)),
        )
        for point in POINTS
    ]
    return found + _stage_points(resolved, hooks)


def _stage_points(resolved: ResolvedConfig, hooks: Hooks) -> list[ShownPoint]:
    from pegboard.core.engine.build import choose
    from pegboard.core.engine.source import PreparedModel
    from pegboard.core.engine.stages import StageBuilder, brought, frontend_context
    from pegboard.core.interfaces.frontend import FrontendStage
    from pegboard.core.interfaces.hooks import API, DEVICE, SCHEDULER
    from pegboard.core.interfaces.stage import DevicePart, Stage

    chosen = choose(resolved, hooks)[0]
    builder = StageBuilder(chosen, hooks, Path())
    model = PreparedModel(chosen.model.directory, chosen.tokenizer)
    ctx = frontend_context(resolved, chosen.selection, model, Path())
    front = [part for part, _, _ in brought(hooks, FrontendStage, "frontend_stages", ctx=ctx)]
    return [
        *_methods(FrontendStage, front, API),
        *_methods(Stage, builder.points.stages, SCHEDULER),
        *_methods(DevicePart, builder.parts, DEVICE),
    ]


def _methods(kind: type, parts: Sequence[Stage | DevicePart | FrontendStage], process: str) -> Iterator[ShownPoint]:
    """Yield the methods of a kind of stages in their order, each with the stages that override it."""
    for name, method in vars(kind).items():
        if inspect.isfunction(method):
            having = [part for part in parts if getattr(type(part), name) is not method]
            who = tuple(Listener(part.name, f"{type(part).__module__}:{type(part).__qualname__}") for part in having)
            when = " ".join(re.split(r"[.:;](?:\s|$)", inspect.getdoc(method) or "")[0].split())
            yield ShownPoint(f"{kind.__name__}.{name}", process, when[:1].lower() + when[1:], _COST, who)


def pipeline(
    files: Files = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print every point at which plugins take part with a config, and which plugins, in the order of the calls."""
    points = points_of(composed(files, overrides))
    if as_json:
        write_json([asdict(point) for point in points])
        return
    rows = [
        (shown.point, shown.process, ", ".join(listener.plugin for listener in shown.listeners) or "-", shown.when)
        for shown in points
    ]
    write_table(("point", "process", "plugins, in order", "called"), rows)
