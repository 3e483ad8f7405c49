"""The suite of GrammarBackend on xgrammar."""

from __future__ import annotations

from pegboard.core.testing.grammar import GrammarContract


class TestXGrammar(GrammarContract):
    provider = "xgrammar"
