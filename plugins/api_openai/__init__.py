"""The OpenAI-compatible HTTP surface."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="api_openai",
    version="0.1.0",
    requires=("sessions_in_memory",),
    summary="OpenAI-compatible routes",
    providers=(
        Provider(
            contract="api",
            name="openai",
            factory="pegboard.plugins.api_openai.router:OpenAIRouter",
            config="pegboard.plugins.api_openai.options:OpenAIOptions",
            summary="/v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, /v1/score and more",
        ),
    ),
)
