"""The suite of GrammarBackend on llguidance."""

from __future__ import annotations

from pegboard.core.testing.grammar import GrammarContract


class TestLLGuidance(GrammarContract):
    provider = "llguidance"
