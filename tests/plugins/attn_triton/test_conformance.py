"""The suite of AttentionBackend on the Triton kernels."""

from __future__ import annotations

import pytest

from pegboard.conformance.attention import AttentionContract

# As it should: see kernels._scores. Only the interpreter, which is numpy, mentions it.
OVERFLOWS = pytest.mark.filterwarnings("ignore:.*overflow encountered in exp2")


@OVERFLOWS
class TestTriton(AttentionContract):
    provider = "triton"
    tree_examples = (10, 40)


@OVERFLOWS
@pytest.mark.full
class TestSplitTriton(AttentionContract):
    """Decodes in several parts, which the default does only for long contexts."""

    provider = "triton"
    options = {"kv_split": 16, "block_keys": 16, "kv_parts": 8}
    tree_examples = (2, 2)
