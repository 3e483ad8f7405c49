"""The parser that finds nothing."""

from __future__ import annotations

from pegboard.conformance.reasoning_parser import ReasoningParserContract
from pegboard.conformance.tool_parser import ToolParserContract


class TestPlainTools(ToolParserContract):
    provider = "plain"


class TestPlainReasoning(ReasoningParserContract):
    provider = "plain"
