"""The suite of AttentionBackend on the Triton kernels."""

from __future__ import annotations

import pytest
import torch

from pegboard.conformance.attention import AttentionContract
from pegboard.conformance.attention.base import DECODES, RAGGED
from pegboard.conformance.attention.batches import AttentionRig, make_layer

# As it should: see kernel_parts.scored_block. Only the interpreter, which is numpy, mentions it.
OVERFLOWS = pytest.mark.filterwarnings("ignore:.*overflow encountered in exp2")


@OVERFLOWS
class TestTriton(AttentionContract):
    provider = "triton"
    tree_examples = (10, 40)

    @pytest.mark.parametrize(
        ("dim", "dtype", "kept"), [(80, torch.float32, None), (160, torch.float16, torch.float8_e4m3fn)], ids=str
    )
    def test_heads_in_chunks(
        self, dim: int, dtype: torch.dtype, kept: torch.dtype | None, device: torch.device
    ) -> None:
        """Scores are added up over chunks of 32 dimensions, and 128: the last chunk is not full."""
        for lens in (RAGGED, DECODES):
            rig = AttentionRig([make_layer(3, 1, dim)], lens, dtype=dtype, kv_dtype=kept, device=device)
            self.check(rig, rig.run(self.make(rig)))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("common", [0, 48])
    def test_latents_of_many_heads(self, common: int, dtype: torch.dtype, device: torch.device) -> None:
        """In several tiles, each of which reads the latents, also those of a prefix that all requests share."""
        lens = [(common + prefix, 1) for prefix, _ in DECODES] if common else RAGGED
        layer = make_layer(48, 1, 24, 16, scale=0.11, latent=True)
        rig = AttentionRig([layer], lens, page_size=16, dtype=dtype, device=device, common=common)
        self.check(rig, rig.run(self.make(rig)))


@OVERFLOWS
@pytest.mark.full
class TestSplitTriton(AttentionContract):
    """Decodes in several parts, which the default does only for long contexts."""

    provider = "triton"
    options = {"kv_split": 16, "block_keys": 16, "kv_parts": 8}
    tree_examples = (2, 2)
