"""Drafts by a small network over the model's own states: EAGLE-1, 2 and 3."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="spec_eagle",
    version="0.1.0",
    requires=("speculation",),
    summary="speculative decoding by EAGLE heads, as chains or trees",
    providers=(
        Provider(
            contract="speculator",
            name="eagle",
            factory="pegboard.plugins.spec_eagle.speculator:EagleSpeculator",
            config="pegboard.plugins.spec_eagle.options:EagleOptions",
            summary="an EAGLE-1, EAGLE-2 or EAGLE-3 head, which reads the model's states and drafts chains or trees",
            provides=frozenset({"branches", "device", "judges"}),
        ),
    ),
)
