"""The two halves, each imported in the process that it runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl

if TYPE_CHECKING:
    from pegboard.core.interfaces.frontend import FrontendStage
    from pegboard.core.interfaces.stage import Stage, StageContext


class StopExpressionHooks:
    """Brings the stage `stop_expressions`."""

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        from pegboard.plugins.stop_expressions.stage import StopExpressions

        return [StopExpressions()]

    @hookimpl
    def frontend_stages(self) -> list[FrontendStage]:
        from pegboard.plugins.stop_expressions.stage import ExpressionFrontend

        return [ExpressionFrontend()]
