"""What brings the halves of the stage, for models some of whose layers have a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import ConfigError, Problem
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.plugins.windows.options import WindowFields

if TYPE_CHECKING:
    from pegboard.core.interfaces.stage import DevicePart, Stage, StageContext
    from pegboard.plugins.windows.options import WindowOptions

KEY = "memory.window_pages"


class WindowHooks:
    """Brings the stage `windows`."""

    def __init__(self, options: WindowOptions) -> None:
        self._every = options.snapshot_every
        self._on = options.section(WindowFields).window_pages is True

    @hookimpl
    def model_services(self) -> Mapping[str, object]:
        """Have families give layers with windows groups of their own."""
        from pegboard.toolkit.model.kv_groups import SERVICE

        return {SERVICE: True} if self._on else {}

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        """Bring it, if it has something to do. Raises ConfigError for what does not work with it."""
        if len(ctx.spec.kv_groups) == 1:
            if self._on:
                _check_family(ctx)
            return []
        if "own_attention" in ctx.runner:
            text = f"the runner {ctx.runner_name!r} reads keys and values itself, from one KV group; set it to false"
            raise ConfigError(Problem(KEY, f"{text}, or choose another runner.use"))
        if ctx.spec.states:
            raise ConfigError(Problem(KEY, f"{ctx.spec.architecture} keeps states, too; set it to false"))
        from pegboard.plugins.windows.pages import WindowPages
        from pegboard.plugins.windows.stage import Windows

        windows = [group.window or 1 for group in ctx.spec.kv_groups[1:]]
        page_size = ctx.config.memory.page_size
        return [Windows(lambda memory: WindowPages(windows, memory, page_size, self._every))]

    @hookimpl
    def device_parts(self, ctx: StageContext) -> list[DevicePart]:
        if len(ctx.spec.kv_groups) == 1:
            return []
        from pegboard.plugins.windows.part import WindowPart

        return [WindowPart()]


def _check_family(ctx: StageContext) -> None:
    """Raise ConfigError for a family that gives layers no groups although they have windows."""
    length = ctx.spec.max_context_len
    if any(layer.window is not None and layer.window < length for layer in ctx.spec.layers):
        (family,) = ctx.choices["model_family"]
        text = f"the model family {family.name!r} keeps layers with windows in one KV group with all others"
        raise ConfigError(Problem(KEY, f"{text}; set it to false, or choose another model.use"))
