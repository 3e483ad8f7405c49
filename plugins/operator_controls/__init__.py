"""What operators ask of a running engine: pause and go on, what is logged, the garbage collector."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="operator_controls",
    version="0.1.0",
    summary="control actions of operators: pause, go on, logging, the garbage collector",
    fields={"": "pegboard.plugins.operator_controls.options:LogFields"},
    hooks=("pegboard.plugins.operator_controls.controls:OperatorControls",),
)
