"""Logits processors that a request names, with parameters of its own. `dry` is not in the default list: add it to
`logits_processors`.
"""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="logits_custom",
    version="0.1.0",
    summary="logits processors that requests name: dry, bad_words, allowed_token_ids",
    providers=(
        Provider(
            contract="logits_processor",
            name="dry",
            factory="pegboard.plugins.logits_custom.dry:Dry",
            config="pegboard.plugins.logits_custom.options:DryOptions",
            summary="penalises tokens that would continue a repetition of what stands there already",
            provides=frozenset({"params", "tokens_ahead"}),
        ),
        Provider(
            contract="logits_processor",
            name="bad_words",
            factory="pegboard.plugins.logits_custom.bad_words:BadWords",
            summary="never completes any of a list of words",
            provides=frozenset({"params", "tokens_ahead"}),
        ),
        Provider(
            contract="logits_processor",
            name="allowed_token_ids",
            factory="pegboard.plugins.logits_custom.allowed_token_ids:AllowedTokenIds",
            summary="forbids every token but those of a list",
            provides=frozenset({"params", "tokens_ahead"}),
        ),
    ),
)
