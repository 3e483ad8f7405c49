"""Anthropic's HTTP surface."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="api_anthropic",
    version="0.1.0",
    summary="Anthropic-compatible routes",
    providers=(
        Provider(
            contract="api",
            name="anthropic",
            factory="pegboard.plugins.api_anthropic.router:AnthropicRouter",
            config="pegboard.plugins.api_anthropic.options:AnthropicOptions",
            summary="/v1/messages and /v1/messages/count_tokens",
        ),
    ),
)
