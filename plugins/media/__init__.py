"""Pictures and videos in prompts: prepared, encoded in steps of their own, and read by the model in place of tokens."""

from pegboard.core.interfaces.plugin import Plugin

plugin = Plugin(
    name="media",
    version="0.1.0",
    summary="pictures and videos in prompts",
    hooks=("pegboard.plugins.media.hooks:MediaHooks",),
)
