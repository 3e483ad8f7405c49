"""Without a GPU these tests run in Triton's interpreter; with one, kernels are compiled and the CPU tests skip."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest) -> None:
    if not torch.cuda.is_available():
        request.getfixturevalue("interpreted_triton")
