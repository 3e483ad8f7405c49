"""The suite of GrammarBackend on none."""

from __future__ import annotations

from pegboard.conformance.grammar import GrammarContract


class TestNone(GrammarContract):
    provider = "none"
