"""Contracts of output parsers; and parsers that find nothing, for models that neither think aloud nor call tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.contract import Cardinality, Contract
from pegboard.core.interfaces.plugin import Plugin, Provider

if TYPE_CHECKING:
    from pegboard.toolkit.parsing.output_parser import OutputParser, OutputParserContext

REASONING_PARSER: Contract[OutputParser, OutputParserContext] = Contract(
    "reasoning_parser",
    "reasoning_parser",
    Cardinality.MATCHED,
    "pegboard.toolkit.parsing.output_parser:OutputParser",
    "tells a model's thinking from its answer, in streamed text",
    suite="pegboard.conformance.reasoning_parser:ReasoningParserContract",
    api_side=True,
)

TOOL_PARSER: Contract[OutputParser, OutputParserContext] = Contract(
    "tool_parser",
    "tool_parser",
    Cardinality.MATCHED,
    "pegboard.toolkit.parsing.output_parser:OutputParser",
    "finds tool calls in streamed text, and writes the grammars that force them",
    suite="pegboard.conformance.tool_parser:ToolParserContract",
    capabilities={
        "forces": "has a grammar for answers that have to be calls",
        "opens": "knows how forced calls begin, so that an answer may be calls or follow a format",
        "streams_arguments": "tells arguments while they come, not when the call is complete",
    },
    api_side=True,
)

plugin = Plugin(
    name="parsers_plain",
    version="0.1.0",
    summary="an answer is content and nothing else",
    hooks=("pegboard.plugins.parsers_plain.hooks:ParserHooks",),
    contracts=(REASONING_PARSER, TOOL_PARSER),
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
