"""The prefix cache that keeps nothing."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="cache_none",
    version="0.1.0",
    summary="no prefix cache",
    providers=(
        Provider(
            contract="prefix_cache",
            name="none",
            factory="pegboard.plugins.cache_none.cache:NoCache",
            summary="keeps nothing: every prompt is computed in full",
            rank=0,
        ),
    ),
)
