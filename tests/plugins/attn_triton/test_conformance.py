"""The suite of AttentionBackend on the Triton kernels."""

from __future__ import annotations

import pytest

from pegboard.conformance.attention import AttentionContract


class TestTriton(AttentionContract):
    provider = "triton"


@pytest.mark.full
class TestSplitTriton(AttentionContract):
    """Decodes in several parts, which the default does only for long contexts."""

    provider = "triton"
    options = {"kv_split": 16, "block_keys": 16}
