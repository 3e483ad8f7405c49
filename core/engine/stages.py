"""Stages: what hook classes of plugins bring to an engine, by the three hooks that ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pegboard.core.engine.reserving import answers
from pegboard.core.interfaces.errors import PluginError
from pegboard.core.interfaces.stage import DevicePart, FrontendStage, Stage, StageContext
from pegboard.core.interfaces.status import FinishReason
from pegboard.core.pipeline.frontend.features import Features
from pegboard.core.pipeline.points import Points

if TYPE_CHECKING:
    from pegboard.core.engine.choose import Chosen
    from pegboard.core.interfaces.req import Req
    from pegboard.core.registry.hooks import Hooks

PartT = TypeVar("PartT", Stage, DevicePart, FrontendStage)


class StageBuilder:
    """Builds the stages of one scheduler, once providers are chosen, and then their device parts."""

    def __init__(self, chosen: Chosen, hooks: Hooks) -> None:
        self._chosen = chosen
        self._hooks = hooks
        ctx = StageContext(
            chosen.resolved.engine, chosen.spec, chosen.model.directory, frozenset(chosen.runner.provides),
            chosen.providers, self._end, chosen.runner.name, chosen.selection.choices, self._failed,
        )  # fmt: skip
        self.points = Points(self._all(Stage, "pipeline_stages", ctx), chosen.culprits)
        self.parts = self._all(DevicePart, "device_parts", ctx)
        known = {stage.name for stage in self.points.stages}
        if strangers := [part.name for part in self.parts if part.name not in known]:
            raise PluginError(f"device parts without a stage of their name: {', '.join(strangers)}")

    def _end(self, req: Req, reason: FinishReason) -> None:
        self.points.end(req, reason)

    def _failed(self, made: object) -> None:
        self._chosen.culprits.count(self._chosen.culprits.known(made))

    def _all(self, kind: type[PartT], hook: str, ctx: StageContext) -> list[PartT]:
        found = []
        for part, plugin, origin in brought(self._hooks, kind, hook, ctx=ctx):
            self._chosen.culprits.know_part(
                hook.removesuffix("s").removeprefix("pipeline_"), part.name, f"{plugin}, {origin}", part
            )
            found.append(part)
        return found


def frontend_features(hooks: Hooks) -> Features:
    """Return what plugins do in the process that takes requests."""
    found = brought(hooks, FrontendStage, "frontend_stages")
    return Features(
        [part for part, _, _ in found], {part.name: f"{plugin}, {origin}" for part, plugin, origin in found}
    )


def brought(hooks: Hooks, kind: type[PartT], hook: str, **given: object) -> list[tuple[PartT, str, str]]:
    """Return what the implementations of a hook bring, each with its plugin's name and origin. Raises PluginError,
    naming the plugin, for one that raises or brings something else.
    """
    found = []
    for plugin, origin, parts in answers(hooks, hook, list, **given):
        for part in parts:
            if not isinstance(part, kind) or not part.name:
                raise PluginError(
                    f"{hook} of plugin {plugin!r} ({origin}): {part!r} is not a {kind.__name__} with a name"
                )
            found.append((part, plugin, origin))
    return found
