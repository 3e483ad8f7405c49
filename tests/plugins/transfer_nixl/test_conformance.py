"""The engine over NIXL keeps the contract: over a fake in `make test`, over the real one where it is."""

from __future__ import annotations

import pytest

from pegboard.plugins.kv_handoff.suite import KVTransferContract
from tests.plugins.transfer_nixl import fake_nixl
from tests.plugins.transfer_peers import PeersThatEnd
from tests.plugins.transfer_staged import StagedReads


class TestOverAFake(StagedReads, KVTransferContract):
    provider = "nixl"

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_nixl.install(monkeypatch)


@pytest.mark.transfer_packages
class TestOverNixl(StagedReads, KVTransferContract):
    provider = "nixl"


@pytest.mark.transfer_packages
class TestPeers(PeersThatEnd):
    """Over TCP: by shared memory UCX reads on while a peer is stopped."""

    provider = "nixl"
    options = {"ucx": {"TLS": "tcp"}}

    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("nixl", exc_type=ImportError)
