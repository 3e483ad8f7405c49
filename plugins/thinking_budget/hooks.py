"""The two halves, each imported in the process that it runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.hooks import hookimpl

if TYPE_CHECKING:
    from pegboard.core.interfaces.frontend import FrontendContext, FrontendStage
    from pegboard.core.interfaces.stage import Stage, StageContext


class ThinkingBudgetHooks:
    """Brings the stage `thinking_budget`."""

    @hookimpl
    def pipeline_stages(self, ctx: StageContext) -> list[Stage]:
        from pegboard.plugins.thinking_budget.stage import ThinkingBudget

        return [ThinkingBudget(ctx.tokenizer, ctx.spec.vocab_size)]

    @hookimpl
    def frontend_stages(self, ctx: FrontendContext) -> list[FrontendStage]:
        from pegboard.plugins.thinking_budget.frontend import BudgetFrontend

        return [BudgetFrontend(ctx.tokenizer)]
