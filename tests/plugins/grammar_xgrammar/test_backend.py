"""The suite of GrammarBackend on xgrammar."""

from __future__ import annotations

from pegboard.conformance.grammar import GrammarContract


class TestXGrammar(GrammarContract):
    provider = "xgrammar"
