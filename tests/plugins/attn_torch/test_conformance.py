"""The suite of AttentionBackend on plain torch."""

from __future__ import annotations

from pegboard.conformance.attention import AttentionContract


class TestTorch(AttentionContract):
    provider = "torch"
