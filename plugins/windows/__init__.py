"""Pages of their own for layers that keep a window of the newest tokens, such as most of Gemma's and GPT-OSS'."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="windows",
    version="0.1.0",
    summary="gives the pages behind a sliding window back, so that memory holds more requests",
    config="pegboard.plugins.windows.options:WindowOptions",
    fields={"memory": "pegboard.plugins.windows.options:WindowFields"},
    hooks=("pegboard.plugins.windows.hooks:WindowHooks",),
)
