"""Ollama's HTTP surface."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="api_ollama",
    version="0.1.0",
    summary="Ollama-compatible routes",
    providers=(
        Provider(
            contract="api",
            name="ollama",
            factory="pegboard.plugins.api_ollama.router:OllamaRouter",
            config="pegboard.plugins.api_ollama.options:OllamaOptions",
            summary="/api/chat, /api/generate, /api/embed, and what Ollama's clients ask about models",
        ),
    ),
)
