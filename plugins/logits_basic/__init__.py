"""Logits processors that most requests can ask for."""

from pegboard.core.interfaces.plugin import Plugin, Provider

_MODULE = "pegboard.plugins.logits_basic.processors"

plugin = Plugin(
    name="logits_basic",
    version="0.1.0",
    summary="logit bias, penalties and min_new_tokens",
    providers=(
        Provider(
            contract="logits_processor",
            name="logit_bias",
            factory=f"{_MODULE}:LogitBias",
            summary="adds a request's logit_bias",
            provides=frozenset({"tokens_ahead"}),
        ),
        Provider(
            contract="logits_processor",
            name="penalties",
            factory="pegboard.plugins.logits_basic.penalties:Penalties",
            summary="frequency, presence and repetition penalties",
            provides=frozenset({"tokens_ahead"}),
        ),
        Provider(
            contract="logits_processor",
            name="min_new_tokens",
            factory=f"{_MODULE}:MinNewTokens",
            summary="forbids end-of-sequence tokens before min_new_tokens",
            provides=frozenset({"tokens_ahead"}),
        ),
    ),
)
