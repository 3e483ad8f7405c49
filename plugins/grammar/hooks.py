"""The two halves, each imported in the process that it runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl

if TYPE_CHECKING:
    from pegboard.core.interfaces.frontend import FrontendStage
    from pegboard.core.interfaces.stage import Stage, StageContext


class GrammarHooks:
    """Brings the stage `grammar`."""

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        from pegboard.plugins.grammar.stage import grammar_stages

        return grammar_stages(ctx)

    @hookimpl
    def frontend_stages(self) -> list[FrontendStage]:
        from pegboard.plugins.grammar.frontend import GrammarFrontend

        return [GrammarFrontend()]
