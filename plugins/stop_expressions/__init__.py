"""Regular expressions that end an output (`stop_regex`)."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="stop_expressions",
    version="0.1.0",
    summary="regular expressions that end an output",
    hooks=("pegboard.plugins.stop_expressions.hooks:StopExpressionHooks",),
)
