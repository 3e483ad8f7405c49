"""``pegboard plugins pipeline``: every point at which plugins take part, and who is in it for a config."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from pegboard.core.cli.config import Files, Overrides, composed
from pegboard.core.cli.output import write_json, write_table

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig


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
    """Return every point in the order of an engine's life and of a step. Raises PluginError where a hook class cannot
    be built.
    """
    from pegboard.core.interfaces.hooks import POINTS
    from pegboard.core.registry.hooks import Hooks

    hooks = Hooks.load(resolved.registry, resolved.plugin_options)
    return [
        ShownPoint(
            one.name, one.process, one.when, one.cost, tuple(Listener(*found) for found in hooks.listeners(one.name))
        )
        for one in POINTS
    ]


def pipeline(
    files: Files = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print, for a config, every point at which plugins take part, with who does, in the order of the calls."""
    points = points_of(composed(files, overrides))
    if as_json:
        write_json([asdict(one) for one in points])
        return
    rows = [
        (one.point, one.process, ", ".join(listener.plugin for listener in one.listeners) or "-", one.when)
        for one in points
    ]
    write_table(("point", "process", "plugins, in order", "called"), rows)
