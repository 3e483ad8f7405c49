"""Stages: what hook classes of plugins bring to an engine, by the three hooks that ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pegboard.core.engine.reserving import answers
from pegboard.core.frontend.features import Features
from pegboard.core.interfaces.choosing import Blueprint
from pegboard.core.interfaces.contracts import MODEL_FAMILY, RUNNER
from pegboard.core.interfaces.errors import ModelError, PluginError
from pegboard.core.interfaces.frontend import FrontendContext, FrontendStage
from pegboard.core.interfaces.stage import DevicePart, Stage, StageContext
from pegboard.core.interfaces.status import FinishReason
from pegboard.core.pipeline.points import Points

if TYPE_CHECKING:
    from pathlib import Path

    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.config.select import Selection
    from pegboard.core.engine.choose import Chosen
    from pegboard.core.engine.source import PreparedModel
    from pegboard.core.interfaces.contract import Contract, Ctx, T
    from pegboard.core.interfaces.prefix_cache import PrefixCache
    from pegboard.core.interfaces.req import Req
    from pegboard.core.registry.hooks import Hooks

PartT = TypeVar("PartT", Stage, DevicePart, FrontendStage)


class StageBuilder:
    """Builds the stages of one scheduler, once providers are chosen, and then their device parts."""

    def __init__(self, chosen: Chosen, hooks: Hooks, scratch: Path) -> None:
        self._chosen = chosen
        self._hooks = hooks
        from pegboard.core.engine.sizing import chunk_size  # it needs torch, which the API process does without

        config, model = chosen.resolved.engine, chosen.model
        ctx = StageContext(
            config, chosen.spec, model, chosen.tokenizer, frozenset(chosen.runner.provides), chosen.selection.choose,
            chosen.providers, self._find, chosen.selection.missing, self.lacking, self._end, chosen.runner.name,
            chunk_size(config, model.device), scratch, chosen.selection.choices, self._failed,
        )  # fmt: skip
        self.points = Points(self._all(Stage, "pipeline_stages", ctx), chosen.culprits)
        self.splits = any(stage.splits for stage in self.points.stages)
        self.chunk_size = chunk_size(config, model.device, splits=self.splits)
        self.parts = self._all(DevicePart, "device_parts", ctx)
        known = {stage.name for stage in self.points.stages}
        if chosen.spec.states and not any(part.states for part in self.parts):
            raise ModelError(
                f"{chosen.spec.architecture} keeps states, for which no plugin that is on brings memory; see what is "
                "switched off below `plugins` in the config"
            )
        if len(chosen.spec.kv_groups) > 1 and not any(part.kv_groups for part in self.parts):
            raise ModelError(
                f"{chosen.spec.architecture} has several KV groups, for which no plugin that is on brings pages; see "
                "what is switched off below `plugins` in the config"
            )
        if strangers := [part.name for part in self.parts if part.name not in known and not part.loads]:
            raise PluginError(f"device parts without a stage of their name: {', '.join(strangers)}")

    def check_loader(self, cache: PrefixCache) -> None:
        """Raise PluginError where the device part is missing that loads what the prefix cache promises."""
        if cache.loader and not any(part.name == cache.loader and part.loads for part in self.parts):
            who = self._chosen.culprits.name(cache)
            raise PluginError(f"the prefix cache {who!r} needs a device part {cache.loader!r}, which no plugin brings")

    def _find(self, contract: Contract[T, Ctx], ctx: Ctx) -> T | None:
        return None if self._chosen.selection.find(contract, ctx) is None else self._chosen.providers(contract, ctx)

    def lacking(self, capability: str) -> str | None:
        """Return who of the runner, and the network that it runs, lacks a capability; None: neither does."""
        choices = self._chosen.selection.choices
        (runner,) = choices[RUNNER.name]
        for one in (runner, *(() if "own_weights" in runner.provides else choices[MODEL_FAMILY.name])):
            if capability not in one.provides:
                return f"{one.record.provider.contract.replace('_', ' ')} {one.name!r}"
        return None

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


def frontend_context(
    resolved: ResolvedConfig, selection: Selection, model: PreparedModel, scratch: Path
) -> FrontendContext:
    """Return what frontend stages are built with. `scratch` is shared with the scheduler's process."""

    def find(contract: Contract[T, Ctx], ctx: Ctx) -> T | None:
        choice = selection.find(contract, ctx)
        return None if choice is None else choice.build(ctx)

    def blueprint(contract: Contract[T, Ctx]) -> Blueprint:
        (choice,) = selection.choices[contract.name]
        provider = choice.record.provider
        model_of_options = provider.config or "pegboard.core.interfaces.options:NoOptions"
        return Blueprint(provider.factory, model_of_options, choice.options.model_dump(mode="json"))

    return FrontendContext(resolved.engine, model.directory, model.tokenizer, find, blueprint, scratch)


def frontend_features(hooks: Hooks, ctx: FrontendContext) -> Features:
    """Return what plugins do in the process that takes requests."""
    found = brought(hooks, FrontendStage, "frontend_stages", ctx=ctx)
    return Features(
        [part for part, _, _ in found], {part.name: f"{plugin}, {origin}" for part, plugin, origin in found}
    )


def brought(hooks: Hooks, kind: type[PartT], hook: str, **given: object) -> list[tuple[PartT, str, str]]:
    """Return what the implementations of a hook bring, each with its plugin's name and origin. Raises PluginError,
    naming the plugin, for one that raises or brings something else.
    """
    found = []
    for plugin, origin, parts in answers(hooks, hook, list[object], **given):
        for part in parts:
            if not isinstance(part, kind) or not part.name:
                raise PluginError(
                    f"{hook} of plugin {plugin!r} ({origin}): {part!r} is not a {kind.__name__} with a name"
                )
            found.append((part, plugin, origin))
    return found
