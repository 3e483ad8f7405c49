"""Thinking that ends after so many tokens (`thinking_token_budget`)."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="thinking_budget",
    version="0.1.0",
    summary="ends a model's thinking after so many tokens",
    hooks=("pegboard.plugins.thinking_budget.hooks:ThinkingBudgetHooks",),
)
