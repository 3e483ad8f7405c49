"""The suite of GrammarBackend on none."""

from __future__ import annotations

from pegboard.plugins.grammar.suite import GrammarContract


class TestNone(GrammarContract):
    provider = "none"
