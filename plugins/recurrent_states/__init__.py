"""States of models whose layers keep something beside keys and values: recurrences, convolutions over tokens."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="recurrent_states",
    version="0.1.0",
    summary="keeps what recurrent and convolution layers keep of each request, and snapshots of it for shared prefixes",
    config="pegboard.plugins.recurrent_states.options:StateOptions",
    hooks=("pegboard.plugins.recurrent_states.hooks:StateHooks",),
)
