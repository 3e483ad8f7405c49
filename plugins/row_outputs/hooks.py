"""The three halves, each imported in the process that it runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl

if TYPE_CHECKING:
    from pegboard.core.interfaces.frontend import FrontendStage
    from pegboard.core.interfaces.stage import DevicePart, Stage, StageContext


class RowOutputHooks:
    """Brings the stage `row_outputs`."""

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        from pegboard.plugins.row_outputs.stage import RowOutputs

        return [RowOutputs(ctx)]

    @hookimpl
    def device_parts(self, ctx: StageContext) -> list[DevicePart]:
        from pegboard.plugins.row_outputs.part import RowPart

        return [RowPart(ctx)]

    @hookimpl
    def frontend_stages(self) -> list[FrontendStage]:
        from pegboard.plugins.row_outputs.frontend import RowFrontend

        return [RowFrontend()]
