"""NIXL by itself, for benchmarks/disagg.py: the pages of a read as one transfer, as its examples do it."""

from __future__ import annotations

import secrets
import time
from typing import Any, NamedTuple

import numpy as np

from pegboard.plugins.kv_handoff.api.transfer import Ranges, Region


class Place(NamedTuple):
    """What a reader needs: NIXL's metadata of the source, and where its regions begin."""

    metadata: bytes
    addresses: list[int]


class RawNixl:
    """An agent with the same memory, and the same settings of UCX, as those of the engine."""

    def __init__(self, regions: tuple[Region, ...]) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent: Any = nixl_agent(f"raw-{secrets.token_hex(8)}", nixl_agent_config(backends=[]))
        self._agent.create_backend("UCX", {"engine_config": "TLS=^cma"})
        self._agent.register_memory([(one.address, one.nbytes, 0, "") for one in regions], "DRAM")
        self._addresses = [one.address for one in regions]
        self._peer = ""
        self.place = Place(self._agent.get_agent_metadata(), self._addresses)

    def read(self, place: Place, source: Ranges, target: Ranges) -> float:
        """Seconds that a read takes."""
        self._peer = self._peer or self._agent.add_remote_agent(place.metadata).decode()
        start = time.perf_counter()
        here, there = _descriptors(self._addresses, target), _descriptors(place.addresses, source)
        descriptors = [self._agent.get_xfer_descs(one, "DRAM") for one in (here, there)]
        handle = self._agent.initialize_xfer("READ", *descriptors, self._peer)
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(0.0002)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise SystemExit(f"NIXL has failed: {state}")
        self._agent.release_xfer_handle(handle)
        return time.perf_counter() - start


def _descriptors(addresses: list[int], ranges: Ranges) -> np.ndarray:
    begins = np.array(addresses, np.uint64)[ranges.region] + ranges.offset.astype(np.uint64)
    return np.stack([begins, ranges.nbytes.astype(np.uint64), np.zeros(len(ranges), np.uint64)], axis=1)
