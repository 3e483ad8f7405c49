"""The suite of Linears on products in Triton, interpreted."""

from __future__ import annotations

import pytest
import torch

from pegboard.plugins.quantization.api import LinearContext
from pegboard.plugins.quantization.suite.linear import LinearContract


class TestTriton(LinearContract):
    """In bfloat16 the interpreter's products of matrices are wrong, so float16 is tried in its place. With 16 tokens at
    most some products decode the codes in the product, and others before it.
    """

    provider = "triton"
    options = {"most_tokens": 16}

    @pytest.fixture(params=(torch.float32, torch.float16), ids=("float32", "float16"))
    def ctx(self, request: pytest.FixtureRequest) -> LinearContext:
        return LinearContext(torch.device("cpu"), request.param)
