"""The record of four stages: what takes part in steps, beside what is chosen. On where a config names it:
`plugins: {example_stages: true}`.
"""

from pegboard.core.interfaces import Plugin

plugin = Plugin(
    name="example_stages",
    version="1.0.0",
    summary="steps of its own, tokens ahead, a number per token, and a field of requests",
    hooks=("pegboard_example_plugin.stages.hooks:ExampleHooks",),
    config="pegboard_example_plugin.stages.options:StageOptions",
)
