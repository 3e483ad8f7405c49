"""``pegboard plugins pipeline``: every point at which plugins take part, and who is in it for a config."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pegboard.core.cli.config import Files, Overrides, composed
from pegboard.toolkit.system.output import write_json, write_table
from pegboard.toolkit.system.taking_part import hook_points, stage_points

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.interfaces.engine_view import ShownPoint
    from pegboard.core.registry.hooks import Hooks


def points_of(resolved: ResolvedConfig) -> list[ShownPoint]:
    """Return every point in the order of an engine's life and of a step, those of stages last. Providers are chosen
    for that, and no weights are read. Raises as starting an engine does.
    """
    from pegboard.core.registry.hooks import Hooks

    hooks = Hooks.load(resolved.registry, resolved.plugin_options)
    return [*hook_points(hooks.listeners), *_stage_points(resolved, hooks)]


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
        *stage_points(FrontendStage, front, API),
        *stage_points(Stage, builder.points.stages, SCHEDULER),
        *stage_points(DevicePart, builder.parts, DEVICE),
    ]


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
