"""The suite of Linears on products in Triton, compiled."""

from __future__ import annotations

import pytest
import torch

from pegboard.plugins.quantization.api import LinearContext
from pegboard.plugins.quantization.suite.linear import LinearContract

pytestmark = pytest.mark.gpu


class TestCompiled(LinearContract):
    """In all types: 4-bit numbers and e4m3 are decoded by instructions that the interpreter does not have."""

    provider = "triton"
    options = {"most_tokens": 16}

    @pytest.fixture(params=(torch.float32, torch.float16, torch.bfloat16), ids=("float32", "float16", "bfloat16"))
    def ctx(self, request: pytest.FixtureRequest) -> LinearContext:
        return LinearContext(torch.device("cuda"), request.param)
