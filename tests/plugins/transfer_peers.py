"""Peers that are killed and stopped, for engines over libraries that do not tell at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from pegboard.plugins.kv_handoff.api.transfer import KVTransfer, TransferNews, TransferState
from pegboard.plugins.kv_handoff.suite.rig import LEASE, ranges
from tests.plugins.transfer_process import Process, build, source

DONE, FAILED, GONE = TransferState.DONE, TransferState.FAILED, TransferState.GONE
PIECE = 256 * 2**10
SMALL = 2**10
SIZE = 64 * PIECE
PATIENCE = 30.0


class Reader:
    """An engine that reads into memory of its own, and what it has told."""

    def __init__(self, name: str, options: Mapping[str, object]) -> None:
        self.memory: NDArray[np.uint8] = np.zeros(SIZE, np.uint8)
        self.engine: KVTransfer = build(name, options, self.memory)
        self.ended: dict[int, TransferNews] = {}

    def connect(self, peer: Process, name: str) -> None:
        self.engine.connect(name, "127.0.0.1", peer.description)

    def read(self, peer: str, piece: int, pieces: int = 1) -> int:
        """Read so many pieces into their own place."""
        some = ranges([(0, one * PIECE, PIECE) for one in range(piece, piece + pieces)])
        return self.engine.read(peer, LEASE, some, some)

    def read_small(self, peer: str, piece: int, pieces: int = 1) -> int:
        """Read the same in pieces of 1 KiB, none of which is the next one's neighbour."""
        end = (piece + pieces) * PIECE
        some = ranges([(0, at, SMALL) for at in range(end - SMALL, piece * PIECE - 1, -SMALL)])
        return self.engine.read(peer, LEASE, some, some)

    def poll(self, seconds: float, *handles: int) -> None:
        """Poll for so long, or until these reads have ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not (handles and all(one in self.ended for one in handles)):
            self.ended |= {news.handle: news for news in self.engine.poll()}
            time.sleep(0.001)

    def state(self, handle: int) -> TransferState:
        """Wait for a read's end."""
        self.poll(PATIENCE, handle)
        return self.ended[handle].state

    def holds(self, value: int, piece: int) -> bool:
        return bool((self.memory[piece * PIECE : (piece + 1) * PIECE] == value).all())


class PeersThatEnd:
    """Both processes are real, and so is the library."""

    provider: ClassVar[str]
    options: ClassVar[Mapping[str, object]] = {}

    @pytest.fixture
    def reader(self) -> Iterator[Reader]:
        reader = Reader(self.provider, {"timeout": 1.0, **self.options})
        yield reader
        reader.engine.close()

    def source(self, value: int = 7):
        return source(self.provider, self.options, SIZE, value)

    def test_a_peer_that_is_killed(self, reader: Reader) -> None:
        """Amid reads: those that are under way fail, and so does all that is asked for later."""
        with self.source(7) as peer, self.source(9) as other:
            reader.connect(peer, "peer")
            reader.connect(other, "other")
            assert reader.state(reader.read("peer", 0)) is DONE
            assert reader.holds(7, 0)
            # Some gigabytes, so that the last one is not there when the peer ends.
            handles = [reader.read("peer", 0, pieces=30) for _ in range(300)]
            peer.kill()
            states = [reader.state(one) for one in handles]
            assert set(states) <= {DONE, FAILED}
            assert states[-1] is FAILED
            reader.memory[:] = 0
            for _ in range(2):
                assert reader.state(handle := reader.read("peer", 0)) is FAILED
                assert reader.ended[handle].reason
            assert reader.state(reader.read("other", 1)) is DONE
            assert reader.holds(9, 1)
            assert not reader.memory[2 * PIECE :].any()

    def test_a_peer_that_is_stopped(self, reader: Reader) -> None:
        """What is under way neither ends nor fails before the peer goes on: until then it may still be written to."""
        with self.source(7) as peer, self.source(9) as other:
            for one, name in ((peer, "peer"), (other, "other")):
                reader.connect(one, name)
                assert reader.state(reader.read(name, 0)) is DONE
            peer.stop()
            abandoned, kept = reader.read("peer", 1), reader.read("peer", 2)
            reader.poll(0.3)
            reader.engine.abandon(abandoned)
            reader.poll(2.0)
            assert not reader.ended.keys() & {abandoned, kept}, reader.ended
            # Of one that is asked for by now nothing is begun.
            assert reader.state(reader.read("peer", 3)) is FAILED
            assert reader.state(reader.read("other", 4)) is DONE
            assert reader.holds(9, 4)
            peer.go_on()
            assert reader.state(abandoned) is GONE
            assert reader.state(kept) is FAILED
            reader.memory[:] = 0
            reader.poll(0.3)
            assert not reader.memory.any(), "it is written to after its end"
            assert reader.state(reader.read("peer", 5)) is DONE
            assert reader.holds(7, 5)

    def test_small_pieces_of_a_peer_that_is_killed(self, reader: Reader) -> None:
        """They go by way of blocks, which are all free afterwards."""
        with self.source(7) as peer, self.source(9) as other:
            reader.connect(peer, "peer")
            reader.connect(other, "other")
            assert reader.state(reader.read_small("peer", 0)) is DONE
            assert reader.holds(7, 0)
            handles = [reader.read_small("peer", 0, pieces=30) for _ in range(50)]
            peer.kill()
            states = [reader.state(one) for one in handles]
            assert set(states) <= {DONE, FAILED}
            assert states[-1] is FAILED
            assert reader.engine.stats()["staged_bytes_total"] > 0
            assert reader.engine.stats()["staging_blocks_taken"] == 0
            assert reader.state(reader.read_small("other", 1)) is DONE
            assert reader.holds(9, 1)

    @pytest.mark.parametrize("delay", [0.0, 0.02, 0.1])
    def test_small_pieces_of_a_peer_that_is_stopped(self, reader: Reader, delay: float) -> None:
        """What the library has not been asked for yet ends in time, and the rest when the peer goes on."""
        with self.source(7) as peer:
            reader.connect(peer, "peer")
            assert reader.state(reader.read_small("peer", 0)) is DONE
            handles = [reader.read_small("peer", 0, pieces=60) for _ in range(20)]
            reader.poll(delay)
            peer.stop()
            reader.poll(3.0, *handles)
            assert reader.state(reader.read_small("peer", 0)) is FAILED
            peer.go_on()
            assert {reader.state(one) for one in handles} <= {DONE, FAILED}
            assert reader.engine.stats()["staging_blocks_taken"] == 0
            reader.memory[:] = 0
            reader.poll(0.3)
            assert not reader.memory.any(), "it is written to after its end"
            assert reader.state(reader.read_small("peer", 5)) is DONE
            assert reader.holds(7, 5)

    def test_closing_while_a_peer_is_stopped(self) -> None:
        reader = Reader(self.provider, {"timeout": 1.0, **self.options})
        with self.source() as peer:
            reader.connect(peer, "peer")
            assert reader.state(reader.read("peer", 0)) is DONE
            peer.stop()
            handle = reader.read("peer", 1, pieces=60)
            reader.poll(0.3)
            assert handle not in reader.ended
            before = time.monotonic()
            reader.engine.close()
            assert time.monotonic() - before < PATIENCE
            reader.memory[:] = 0
            peer.go_on()
            time.sleep(0.3)
            assert not reader.memory.any(), "it is written to after the engine was closed"
