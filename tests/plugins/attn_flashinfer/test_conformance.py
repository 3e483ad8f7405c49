"""The suite of AttentionBackend on FlashInfer's imitation."""

from __future__ import annotations

import pytest
import torch

from pegboard.conformance.attention import AttentionContract
from tests.plugins.attn_flashinfer.imitated import CASCADE, OPTIONS, Imitated


class OnCpu(AttentionContract):
    """The imitation looks at numbers on the host, which no CUDA graph can record; on a GPU, FlashInfer itself runs."""

    @pytest.fixture
    def device(self) -> torch.device:
        return torch.device("cpu")


class TestFlashInfer(OnCpu):
    provider = "flashinfer"
    factory = Imitated
    options = CASCADE
    tree_examples = (15, 60)


@pytest.mark.full
class TestWithoutCascade(OnCpu):
    provider = "flashinfer"
    factory = Imitated
    options = OPTIONS
    tree_examples = (5, 10)
