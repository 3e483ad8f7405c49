"""The speculator that never drafts against the contract's suite."""

from __future__ import annotations

from pegboard.plugins.speculation.suite import SpeculatorContract


class TestNone(SpeculatorContract):
    provider = "none"
