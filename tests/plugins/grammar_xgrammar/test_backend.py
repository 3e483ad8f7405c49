"""The suite of GrammarBackend on xgrammar."""

from __future__ import annotations

from pegboard.plugins.grammar.suite import GrammarContract


class TestXGrammar(GrammarContract):
    provider = "xgrammar"
