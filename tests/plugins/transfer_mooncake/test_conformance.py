"""The engine over Mooncake keeps the contract: over a fake in `make test`, over the real one where it is."""

from __future__ import annotations

import pytest

from pegboard.plugins.kv_handoff.suite import KVTransferContract
from tests.plugins.transfer_mooncake import fake_engine
from tests.plugins.transfer_peers import PeersThatEnd
from tests.plugins.transfer_staged import StagedReads


class TestOverAFake(StagedReads, KVTransferContract):
    provider = "mooncake"

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_engine.install(monkeypatch)


@pytest.mark.transfer_packages
class TestOverMooncake(StagedReads, KVTransferContract):
    provider = "mooncake"


@pytest.mark.transfer_packages
class TestPeers(PeersThatEnd):
    provider = "mooncake"

    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
