"""Split prefill: some layers of a prompt's pass at a time, with decode steps in between."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="prefill_in_parts",
    version="0.1.0",
    summary="runs some layers of a prefill at a time, with decode steps in between",
    fields={
        "": "pegboard.plugins.prefill_in_parts.options:PartRules",
        "scheduler": "pegboard.plugins.prefill_in_parts.options:PartFields",
    },
    hooks=("pegboard.plugins.prefill_in_parts.hooks:PartHooks",),
)
