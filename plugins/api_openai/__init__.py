"""The OpenAI-compatible HTTP surface."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="api_openai",
    version="0.1.0",
    summary="OpenAI-compatible routes",
    providers=(
        Provider(
            contract="api",
            name="openai",
            factory="pegboard.plugins.api_openai.router:OpenAIRouter",
            summary="/v1/models, /v1/chat/completions and /v1/completions",
        ),
    ),
)
