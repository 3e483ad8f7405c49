"""The suite of AttentionBackend on FlashInfer's imitation."""

from __future__ import annotations

import pytest

from pegboard.conformance.attention import AttentionContract
from pegboard.plugins.attn_flashinfer.options import FlashInferOptions
from tests.plugins.attn_flashinfer.imitated import CASCADE, OPTIONS, PROVIDES, Imitated


class TestFlashInfer(AttentionContract):
    factory = Imitated
    provides = PROVIDES
    options_model = FlashInferOptions
    options = CASCADE
    tree_examples = (15, 60)


@pytest.mark.full
class TestWithoutCascade(AttentionContract):
    factory = Imitated
    provides = PROVIDES
    options_model = FlashInferOptions
    options = OPTIONS
    tree_examples = (5, 10)
