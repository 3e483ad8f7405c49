"""All tests of kernels run in Triton's interpreter, and compiled on a GPU in `make gpu-test`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pegboard.toolkit import kernels


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device on which kernels are used."""
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    request.getfixturevalue("interpreted_triton")
    with kernels.allowed("cpu"):
        yield torch.device("cpu")
