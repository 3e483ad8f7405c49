"""The Triton backend, put to the suite of the contract: interpreted where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.adapters.api import AdapterContext
from pegboard.plugins.adapters.suite import MAX_RANK, SITES, SLOTS, AdapterContract, adapter, expected
from pegboard.plugins.lora_triton.backend import TritonAdapters
from pegboard.toolkit.model.linear import Part, Site


class TestTritonAdapters(AdapterContract):
    """In bfloat16 the interpreter's products of matrices are wrong, so float16 is tried in its place."""

    provider = "triton"
    short_dtype = torch.float16


def context(dtype: torch.dtype = torch.float32, device: str = "cpu", computed_by: str = "") -> AdapterContext:
    return AdapterContext(SITES, dtype, torch.device(device), SLOTS, MAX_RANK, computed_by)


def test_what_it_declines() -> None:
    assert "not torch.float64" in str(TritonAdapters.supports(NoOptions(), context(torch.float64)))
    assert "another backend's" in str(TritonAdapters.supports(NoOptions(), context(computed_by="x")))
    assert TritonAdapters.supports(NoOptions(), context()) is None


def test_bytes_on_a_device() -> None:
    """a and b of each part at the largest rank, in all slots."""
    backend = TritonAdapters(NoOptions(), context(torch.float16))
    numbers = sum(part.rows + site.cols for site in SITES for part in site.parts)
    assert backend.device_bytes == numbers * MAX_RANK * SLOTS * 2


@pytest.mark.parametrize("count", [1, 40])
def test_long_rows_are_cut(count: int) -> None:
    """Columns in pieces, and more tokens of an adapter than a tile holds."""
    site = Site(1, (Part("o", 200),), 1100)
    ctx = AdapterContext((site,), torch.float32, torch.device("cpu"), 2, 40)
    backend = TritonAdapters(NoOptions(), ctx)
    draw = torch.Generator().manual_seed(3)
    a, b = torch.randn(40, 1100, generator=draw) / 32, torch.randn(200, 40, generator=draw)
    weights = adapter(1)
    weights.sites.clear()
    weights.sites[1] = (type(next(iter(adapter(1).sites[1])))(0, a, b, 0.5),)
    backend.activate(2, backend.prepare(weights))
    x, out = torch.randn(count + 2, 1100, generator=draw), torch.zeros(count + 2, 200)
    additions = backend.begin(np.array([0, 2, 0]), np.array([1, count, 1]), torch.from_numpy)
    assert additions is not None
    additions.add(1, x, out)
    wanted = expected(weights, 1, x, torch.zeros(count + 2, 200))
    wanted[0] = wanted[-1] = 0
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)
