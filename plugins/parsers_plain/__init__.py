"""Parsers that find nothing, for models that neither think aloud nor call tools, or in unknown ways."""

from pegboard.core.interfaces.plugin import Plugin, Provider

plugin = Plugin(
    name="parsers_plain",
    version="0.1.0",
    summary="an answer is content and nothing else",
    providers=(
        Provider(
            contract="tool_parser",
            name="plain",
            factory="pegboard.plugins.parsers_plain.parser:PlainParser",
            summary="finds no tool calls",
            rank=0,
        ),
        Provider(
            contract="reasoning_parser",
            name="plain",
            factory="pegboard.plugins.parsers_plain.parser:PlainParser",
            summary="finds no reasoning",
            rank=0,
        ),
    ),
)
