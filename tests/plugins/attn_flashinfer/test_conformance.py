"""The suite of AttentionBackend on FlashInfer's imitation."""

from __future__ import annotations

import pytest

from pegboard.conformance.attention import AttentionContract
from tests.plugins.attn_flashinfer.imitated import CASCADE, OPTIONS, Imitated


class TestFlashInfer(AttentionContract):
    provider = "flashinfer"
    factory = Imitated
    options = CASCADE
    tree_examples = (15, 60)


@pytest.mark.full
class TestWithoutCascade(AttentionContract):
    provider = "flashinfer"
    factory = Imitated
    options = OPTIONS
    tree_examples = (5, 10)
