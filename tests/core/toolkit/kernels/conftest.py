"""Without a GPU these tests run in Triton's interpreter; with one, kernels are compiled for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pegboard.core.toolkit import kernels


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device on which kernels are used."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    request.getfixturevalue("interpreted_triton")
    with kernels.allowed("cpu"):
        yield torch.device("cpu")
