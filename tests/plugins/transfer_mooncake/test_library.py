"""What the engine over Mooncake makes of errors that the library raises, and of peers that are nowhere."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from pegboard.plugins.kv_handoff.api.descriptions import pack, unpack
from pegboard.plugins.kv_handoff.api.transfer import KVTransfer, TransferError, TransferNews, TransferState
from pegboard.plugins.kv_handoff.suite.rig import LEASE, ranges
from pegboard.plugins.transfer_mooncake.transfer import KIND, Description
from tests.plugins.transfer_mooncake import fake_engine
from tests.plugins.transfer_mooncake.fake_engine import FakeEngine
from tests.plugins.transfer_process import build

ALL = ranges([(0, 0, 64)])


class Pair:
    """A source, and a reader that is connected to it."""

    def __init__(self) -> None:
        self.there, self.here = np.full(64, 7, np.uint8), np.zeros(64, np.uint8)
        self.source: KVTransfer = build("mooncake", {}, self.there)
        self.reader: KVTransfer = build("mooncake", {"timeout": 0.2}, self.here)
        self.ended: dict[int, TransferNews] = {}
        self.reader.connect("peer", "127.0.0.1", self.source.describe())

    def read(self) -> int:
        return self.reader.read("peer", LEASE, ALL, ALL)

    def end(self, handle: int) -> TransferNews:
        """Wait for a read's end."""
        until = time.monotonic() + 20
        while handle not in self.ended:
            assert time.monotonic() < until
            self.ended |= {news.handle: news for news in self.reader.poll()}
            time.sleep(0.001)
        return self.ended[handle]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    fake_engine.install(monkeypatch)
    pair = Pair()
    yield pair
    pair.reader.close()
    pair.source.close()


def test_a_read_that_the_library_does_not_begin(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails, and a later one is tried again."""
    assert pair.end(pair.read()).state is TransferState.DONE
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> int:
            raise TypeError("incompatible arguments")

        patch.setattr(FakeEngine, "batch_transfer_async_read", refuse)
        failed = pair.end(pair.read())
    assert failed.state is TransferState.FAILED
    assert "incompatible arguments" in failed.reason
    assert pair.end(pair.read()).state is TransferState.DONE


def test_a_read_of_which_the_library_cannot_say_whether_it_has_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still be written, so it does not end until the library says that it has; what waits fails meanwhile."""
    assert pair.end(pair.read()).state is TransferState.DONE
    with monkeypatch.context() as patch:

        def fail(*_: object) -> int:
            raise RuntimeError("lost track")

        patch.setattr(FakeEngine, "transfer_check_status", fail)
        first = pair.read()
        time.sleep(0.4)
        assert pair.end(pair.read()).state is TransferState.FAILED
        assert first not in pair.ended
    assert pair.end(first).state is TransferState.FAILED
    assert pair.end(pair.read()).state is TransferState.DONE


@pytest.mark.parametrize(
    "wrong", [{"token_address": -1}, {"token_address": 2**64 - 8}, {"token": b"short"}, {"port": 0}, {"port": 2**16}]
)
def test_a_description_of_a_place_that_cannot_be(pair: Pair, wrong: dict[str, object]) -> None:
    said = unpack(KIND, pair.source.describe(), Description)
    description = pack(KIND, msgspec.structs.replace(said, **wrong))
    with pytest.raises(TransferError, match="cannot be one"):
        pair.reader.connect("other", "127.0.0.1", description)
