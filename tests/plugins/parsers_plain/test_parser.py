"""The parser that finds nothing."""

from __future__ import annotations

from pegboard.core.testing.reasoning_parser import ReasoningParserContract
from pegboard.core.testing.tool_parser import ToolParserContract


class TestPlainTools(ToolParserContract):
    provider = "plain"


class TestPlainReasoning(ReasoningParserContract):
    provider = "plain"
