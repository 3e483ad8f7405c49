"""The engine over Mooncake keeps the contract: over a fake in `make test`, over the real one where it is."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from pegboard.conformance.kv_transfer import KVTransferContract
from tests.plugins.transfer_mooncake.fake_engine import FakeEngine
from tests.plugins.transfer_peers import PeersThatEnd


class TestOverAFake(KVTransferContract):
    provider = "mooncake"

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = ModuleType("mooncake.engine")
        vars(module)["TransferEngine"] = FakeEngine
        monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
        monkeypatch.setitem(sys.modules, "mooncake.engine", module)


@pytest.mark.transfer_packages
class TestOverMooncake(KVTransferContract):
    provider = "mooncake"


@pytest.mark.transfer_packages
class TestPeers(PeersThatEnd):
    provider = "mooncake"

    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
