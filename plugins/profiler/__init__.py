"""Traces of the scheduler process, started and stopped while it serves."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="profiler",
    version="0.1.0",
    summary="control actions that write traces of the scheduler process by torch.profiler",
    fields={"server": "pegboard.plugins.profiler.options:ProfilerFields"},
    hooks=("pegboard.plugins.profiler.profiler:Profiler",),
)
