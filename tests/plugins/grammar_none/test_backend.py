"""The suite of GrammarBackend on none."""

from __future__ import annotations

from pegboard.core.testing.grammar import GrammarContract


class TestNone(GrammarContract):
    provider = "none"
