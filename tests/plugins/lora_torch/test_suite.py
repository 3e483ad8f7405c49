"""The torch backend, put to the suite of the contract."""

from __future__ import annotations

import torch

from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.adapters.api import AdapterContext
from pegboard.plugins.adapters.suite import MAX_RANK, SITES, SLOTS, AdapterContract
from pegboard.plugins.lora_torch.backend import TorchAdapters


class TestTorchAdapters(AdapterContract):
    provider = "torch"


def test_bytes_on_a_device() -> None:
    """a and b of each part at the largest rank, in all slots; on a CPU slots refer to what is there anyway."""
    ctx = AdapterContext(SITES, torch.bfloat16, torch.device("meta"), SLOTS, MAX_RANK)
    numbers = sum(part.rows + site.cols for site in SITES for part in site.parts)
    assert TorchAdapters(NoOptions(), ctx).device_bytes == numbers * MAX_RANK * SLOTS * 2
