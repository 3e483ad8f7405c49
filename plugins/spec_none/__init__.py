"""No speculation."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="spec_none",
    version="0.1.0",
    requires=("speculation",),
    summary="no speculative decoding",
    providers=(
        Provider(
            contract="speculator",
            name="none",
            factory="pegboard.plugins.spec_none.speculator:NoSpeculator",
            summary="proposes nothing: one token per request and step",
            rank=10,
        ),
    ),
)
