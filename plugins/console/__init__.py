"""A page at `/`: a chat, the server's figures as they change, its prefix cache, steps, config and plugins."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="console",
    version="0.1.0",
    summary="a page at / to chat with the model and to look at the server while it runs",
    hooks=("pegboard.plugins.console.hooks:Console",),
)
