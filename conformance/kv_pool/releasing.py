"""The suite of KVPool: memory that is given back while it is in no use."""

from __future__ import annotations

import pytest
import torch

from pegboard.conformance.suite import ContractSuite, capability, lacks
from pegboard.core.interfaces.errors import Unsupported
from pegboard.core.interfaces.kv_pool import KVPool


class KVPoolReleaseTests(ContractSuite):
    """A pool may refuse on some devices, and says why."""

    contract = "kv_pool"

    def make(self, device: torch.device) -> KVPool:
        """Return a small pool."""
        raise NotImplementedError

    def fill(self, pool: KVPool) -> list[torch.Tensor]:
        """Write something to all slots; copies of the buffers."""
        raise NotImplementedError

    def buffers(self, pool: KVPool) -> list[torch.Tensor]:
        """Return K and V of all layers."""
        raise NotImplementedError

    @capability("release")
    def test_memory_is_given_back(self, device: torch.device) -> None:
        """Twice, and what is written afterwards is there. Those that keep buffers find them where they were."""
        pool = self.make(device)
        written = self.fill(pool)
        given = self.buffers(pool)
        for _ in range(2):
            self._release(pool)
            assert all(bool(buffer[: pool.page_size].isfinite().all()) for buffer in given), "padding reads page 0"
            self.fill(pool)
            for old, new, wanted in zip(given, self.buffers(pool), written, strict=True):
                assert old.data_ptr() == new.data_ptr(), "a buffer moved"
                assert torch.equal(old, wanted)

    def _release(self, pool: KVPool) -> None:
        try:
            assert pool.release() == pool.nbytes
        except Unsupported as error:
            if not error.detail:
                pytest.fail("a refusal does not say why")
            pytest.skip(str(error))

    @lacks("release")
    def test_no_memory_is_given_back(self, device: torch.device) -> None:
        pool = self.make(device)
        with pytest.raises(Unsupported, match="release"):
            pool.release()
