"""Logits processors that a request names, with parameters of its own. Not in the default list: add them to
`logits_processors`.
"""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="logits_custom",
    version="0.1.0",
    summary="logits processors that requests name: dry, bad_words",
    providers=(
        Provider(
            contract="logits_processor",
            name="dry",
            factory="pegboard.plugins.logits_custom.dry:Dry",
            config="pegboard.plugins.logits_custom.options:DryOptions",
            summary="penalises tokens that would continue a repetition of what stands there already",
            provides=frozenset({"params"}),
        ),
        Provider(
            contract="logits_processor",
            name="bad_words",
            factory="pegboard.plugins.logits_custom.bad_words:BadWords",
            summary="never completes any of a list of words",
            provides=frozenset({"params"}),
        ),
    ),
)
