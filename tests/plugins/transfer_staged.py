"""Engines that read small pieces by way of blocks: the suite, and what it cannot know."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pegboard.plugins.kv_handoff.api.transfer import TransferState
from pegboard.plugins.kv_handoff.suite import KVTransferContract
from pegboard.plugins.kv_handoff.suite.rig import LEASE, pages
from pegboard.plugins.kv_handoff.suite.servers import FAILED, MIB, Servers


class StagedReads(KVTransferContract):
    """Small pieces have leases, though these engines are not `fenced`: large ones have none."""

    @pytest.mark.parametrize(("size", "staged"), [(48, True), (384, True), (64 * 2**10, False)])
    def test_small_pieces_go_by_way_of_blocks(self, servers: Servers, size: int, staged: bool) -> None:
        count = 3 * MIB // size
        source, reader = servers.pair([2 * count * size] * 3)
        draw = np.random.default_rng(size)
        there, here = (draw.permutation(2 * count)[:count].tolist() for _ in range(2))
        wanted, target = pages(3, there, size), pages(3, here, size)
        self.check(source, reader, wanted, target)
        found = reader.engine.stats().get("staged_bytes_total", 0)
        assert found == (wanted.total if staged else 0)
        assert source.engine.stats().get("collected_bytes_total", 0) == found
        assert not any(one.engine.stats()["staging_blocks_taken"] for one in (source, reader))

    def test_pieces_that_were_collected_before_the_lease_ended(self, servers: Servers) -> None:
        """Whenever it ends amid reads: bytes that were written after its end are in none that is DONE."""
        slots = 4 * MIB // 384
        source, reader = servers.pair([slots * 384] * 2)
        order = np.random.default_rng(0).permutation(slots).tolist()
        some = pages(2, order, 384)
        seen = set[TransferState]()
        for number, delay in enumerate(np.linspace(0.0, 0.02, 8).tolist()):
            lease = 100 + number
            source.engine.allow(lease)
            wanted = source.bytes_at(some)
            handle = reader.read(some, some, lease=lease)
            end = time.monotonic() + delay
            while time.monotonic() < end:
                reader.poll()
            source.engine.revoke(lease)
            source.renew()
            (state,) = reader.wait([handle], self.patience)
            assert state is FAILED or np.array_equal(reader.bytes_at(some), wanted), "bytes from after the lease"
            seen.add(state)
        assert FAILED in seen, "no read was caught by the end of its lease"
        source.engine.allow(LEASE)
        self.check(source, reader, some, some)
