"""The native runner's backend, put to the suite of the contract."""

from __future__ import annotations

import pytest
import torch

import tests.plugins.cpu_native.instruction_sets  # noqa: F401  skips where nothing can be compiled
from pegboard.core.interfaces.options import NoOptions
from pegboard.plugins.adapters.api import AdapterContext
from pegboard.plugins.adapters.suite import MAX_RANK, SITES, SLOTS, AdapterContract, adapter
from pegboard.plugins.lora_native.backend import NativeAdapters
from pegboard.plugins.lora_torch.backend import TorchAdapters


class TestNativeAdapters(AdapterContract):
    """Inputs are bf16, sums float32, which is what the tolerance is for."""

    provider = "cpu_native"
    dtype = torch.bfloat16
    computed_by = "cpu_native"

    @pytest.mark.parametrize("count", [7, 8, 9, 31, 32, 33, 70])
    def test_many_tokens(self, count: int) -> None:
        """Rows of one adapter are next to each other or not, and begin in one group of 32 rows and end in another."""
        backend, adapters = self.make(torch.bfloat16), {1: adapter(1), 2: adapter(2, {0: (16, 16, 16), 3: (1,)})}
        self.put_in(backend, adapters)
        self.check(backend, adapters, [1, 2, 1], [count, 3, count])
        self.check(backend, adapters, [1, 0, 2] * count, [1] * 3 * count)

    def test_ranks_that_are_filled_up_are_counted(self) -> None:
        """Of `a`, a rank of 1 takes the memory of 16."""
        backend = self.make(torch.bfloat16)
        prepared = backend.prepare(adapter(1, {0: (1, None, None)}))
        rows, cols = SITES[0].parts[0].rows, SITES[0].cols
        assert backend.host_bytes(prepared, 2 * (rows + cols)) >= 2 * (rows + 16 * cols)


def test_each_backend_has_its_runner() -> None:
    own, other = (
        AdapterContext(SITES, torch.bfloat16, torch.device("cpu"), SLOTS, MAX_RANK, by) for by in ("cpu_native", "")
    )
    assert NativeAdapters.supports(NoOptions(), own) is None
    assert TorchAdapters.supports(NoOptions(), other) is None
    assert "it is for the runner 'cpu_native'" in str(NativeAdapters.supports(NoOptions(), other))
    assert "another backend's additions" in str(TorchAdapters.supports(NoOptions(), own))
