"""Orders of blocks, from peers that do what they must not, and to such peers."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from pegboard.plugins.kv_handoff.api import staging_source
from pegboard.plugins.kv_handoff.api.descriptions import pack, unpack
from pegboard.plugins.kv_handoff.api.listening import TOKEN
from pegboard.plugins.kv_handoff.api.protocol import (
    ANSWER,
    AT_ONCE,
    MAGIC,
    MOST_PIECES,
    ORDER,
    REQUEST,
    RETURN,
    Status,
    pack_request,
)
from pegboard.plugins.kv_handoff.api.staging_reader import Orders, StagingPlace
from pegboard.plugins.kv_handoff.api.transfer import TransferError, TransferState
from pegboard.plugins.kv_handoff.suite.rig import LEASE, ranges
from tests.plugins.kv_handoff import toy
from tests.plugins.kv_handoff.conftest import Dial, Make
from tests.plugins.kv_handoff.peer import SOME, Peer
from tests.plugins.kv_handoff.toy import BLOCK, KIND, SECONDS, SIZE, SLOT, Described, Server, slots

FAILED, DONE = TransferState.FAILED, TransferState.DONE
TOO_MANY = b"".join(ORDER + pack_request(number, LEASE, SOME) for number in range(1, AT_ONCE + 2))


def check_serves(make: Make, source: Server) -> None:
    reader = make()
    reader.connect(source)
    wanted, target = slots(5), slots(6)
    assert reader.wait(reader.read(wanted, target)).state is DONE
    assert reader.holds(target, source, wanted)
    assert reader.engine.stats()["staged_bytes_total"] == wanted.total


# ---- the source ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hello", [MAGIC + bytes(TOKEN), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(20), b"\xff" * 99]
)
def test_strangers_are_sent_away(make: Make, dial: Dial, hello: bytes) -> None:
    source = make()
    assert dial(source, hello).closed()
    source.until(lambda: source.engine.stats().get("refused_connections_total"), "a stranger is not counted")
    check_serves(make, source)


def test_an_order_and_its_return(make: Make, dial: Dial) -> None:
    source = make()
    peer = dial(source)
    peer.order(1)
    number, status, block = peer.answer()
    assert (number, status, source.taken) == (1, Status.READY, 1)
    assert source.engine.staging is not None
    held = source.engine.staging.region.buffer
    assert held is not None
    there = b"".join(source.memory[at : at + SLOT].tobytes() for at in SOME.offset.tolist())
    assert bytes(held[block * BLOCK :][:BLOCK]) == there
    peer.give_back(1)
    assert peer.answer()[:2] == (1, Status.RETURNED)
    assert source.taken == 0
    for number in (1, 7):
        peer.give_back(number)
        assert peer.answer()[:2] == (number, Status.RECALLED)


@pytest.mark.parametrize(
    "piece", [(1, 0, 64), (-1, 0, 64), (0, SIZE - 63, 64), (0, -1, 64), (0, 2**62, 64), (2**30, 0, 64)], ids=str
)
def test_pieces_beyond_the_regions_are_refused(make: Make, dial: Dial, piece: tuple[int, int, int]) -> None:
    source = make()
    peer = dial(source)
    peer.order(1, ranges([(0, 0, 64), piece]))
    assert peer.answer()[:2] == (1, Status.BEYOND)
    peer.order(2)
    assert peer.answer()[:2] == (2, Status.READY)
    assert source.taken == 1


@pytest.mark.parametrize(
    "data",
    [
        b"X",
        ORDER + REQUEST.pack(1, LEASE, 64, 0),
        ORDER + REQUEST.pack(1, LEASE, MOST_PIECES + 1, MOST_PIECES + 1),
        ORDER + REQUEST.pack(1, LEASE, 2**63, 2**32 - 1),
        ORDER + REQUEST.pack(1, LEASE, BLOCK + 1, 1),
        ORDER + pack_request(1, LEASE, ranges([(0, 0, 64), (0, 64, -32), (0, 0, 32)])),
        (ORDER + pack_request(1, LEASE, SOME)) * 2,
        TOO_MANY,
    ],
    ids=["kind", "nothing", "pieces", "huge", "more than a block", "lengths", "number", "orders at once"],
)
def test_what_must_not_come_closes_the_connection(make: Make, dial: Dial, data: bytes) -> None:
    source = make(8)
    peer = dial(source)
    peer.socket.sendall(data)
    assert peer.closed()
    source.until(lambda: source.taken == 0, "blocks of a closed connection are not given back")
    check_serves(make, source)


def test_slow_senders_are_left(make: Make, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "SECONDS", 0.1)
    source = make()
    for part in (ORDER + b"\0" * 5, ORDER + pack_request(1, LEASE, SOME)[:-1], RETURN + b"\0"):
        peer = dial(source)
        peer.socket.sendall(part)
        assert peer.closed()
    check_serves(make, source)


def test_orders_that_wait_are_bounded(make: Make, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has no block is not listened to while too much waits; who has one may return it."""
    source = make(1)
    monkeypatch.setattr(staging_source, "MOST_WAITING", 20 * len(SOME) + 1)  # one order
    first, others = dial(source), [dial(source) for _ in range(3)]
    first.order(1)
    assert first.answer()[:2] == (1, Status.READY)
    for peer in others:
        peer.order(1)
        peer.order(2)

    def waiting() -> float:
        return source.engine.stats()["staging_waiting_bytes"]

    source.until(lambda: waiting() == 20 * len(SOME), "an order waits")
    assert all(peer.quiet() for peer in others)
    assert waiting() == 20 * len(SOME)
    first.give_back(1)
    assert first.answer()[:2] == (1, Status.RETURNED)
    with ThreadPoolExecutor(len(others)) as pool:
        list(pool.map(served, others))
    source.until(lambda: waiting() == source.taken == 0, "all is settled")


def served(peer: Peer) -> None:
    """Return two blocks as they come. Answers come in any order."""
    seen = []
    for _ in range(4):
        number, status, _ = peer.answer()
        seen.append((number, status))
        if status is Status.READY:
            peer.give_back(number)
    assert sorted(seen) == [(number, status) for number in (1, 2) for status in (Status.READY, Status.RETURNED)]


# ---- the reader ------------------------------------------------------------------------------------------------------


class FalseSource:
    """A source whose port of orders a test answers: `say` is what it answers to each order."""

    def __init__(self, real: Server, say: Callable[[int], bytes]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._say = say
        self._connections: list[socket.socket] = []
        said = unpack(KIND, real.engine.describe(), Described)
        assert said.staging is not None
        right, port = said.staging, self._listener.getsockname()[1]
        place = StagingPlace(port, right.token, right.address, right.blocks, right.block_bytes)
        self.description = pack(KIND, Described(said.number, said.sizes, place))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                connection.recv(len(MAGIC) + TOKEN, socket.MSG_WAITALL)
                connection.sendall(MAGIC)
                while header := connection.recv(1 + REQUEST.size, socket.MSG_WAITALL):
                    number, _, _, count = REQUEST.unpack(header[1:])
                    connection.recv(20 * count, socket.MSG_WAITALL)
                    connection.sendall(self._say(number))

    def close(self) -> None:
        for one in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._thread.join()


@pytest.mark.parametrize(
    "say",
    [
        lambda number: ANSWER.pack(number + 1, Status.READY, 0),
        lambda number: ANSWER.pack(number, Status.READY, 4),
        lambda number: ANSWER.pack(number, 99, 0),
        lambda number: ANSWER.pack(number, Status.READY, 0) * 2,
        lambda number: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=["another order", "no block", "status", "twice", "rubbish"],
)
def test_answers_that_cannot_be_fail_the_read(make: Make, say: Callable[[int], bytes]) -> None:
    source, reader = make(), make()
    false = FalseSource(source, say)
    reader.engine.connect("peer", "127.0.0.1", false.description)
    news = reader.wait(reader.read(SOME, SOME))
    assert news.state is FAILED
    assert news.reason
    assert reader.taken == 0
    reader.engine.disconnect("peer")
    false.close()


def test_a_source_that_does_not_answer(make: Make) -> None:
    """Nothing is under way in the library, so the read ends, and its blocks are free."""
    source, reader = make(), make()
    false = FalseSource(source, lambda number: b"")
    reader.engine.connect("peer", "127.0.0.1", false.description)
    handle = reader.read(SOME, SOME)
    reader.until(lambda: reader.taken == 1, "it is ordered")
    reader.poll()
    assert handle not in reader.ended
    reader.clock.ahead = SECONDS + 1
    assert reader.wait(handle).state is FAILED
    assert reader.taken == 0
    assert not reader.engine.begun
    reader.engine.disconnect("peer")
    false.close()


@pytest.mark.parametrize(
    "wrong",
    [{"port": 0}, {"port": 2**16}, {"token": b"short"}, {"blocks": 0}, {"blocks": 2**20}, {"block_bytes": 0},
     {"block_bytes": 2**40}, {"address": -1}, {"address": 2**64 - 1}],
    ids=str,
)  # fmt: skip
def test_staging_that_cannot_be_is_no_description(make: Make, wrong: Mapping[str, int | bytes]) -> None:
    source, reader = make(), make()
    said = unpack(KIND, source.engine.describe(), Described)
    right = StagingPlace(port=1, token=bytes(TOKEN), address=0, blocks=1, block_bytes=4096)
    right.check()
    place = msgspec.structs.replace(right, **wrong)
    with pytest.raises(TransferError, match="staging"):
        reader.engine.connect("peer", "127.0.0.1", pack(KIND, Described(said.number, said.sizes, place)))


def test_a_source_that_cannot_be_reached_is_told_with_the_key(caplog: pytest.LogCaptureFixture) -> None:
    """0.0.0.0 leads to this machine, and is not a loopback address."""
    with socket.socket() as silent, caplog.at_level(logging.WARNING):
        silent.bind(("127.0.0.1", 0))
        place = StagingPlace(silent.getsockname()[1], bytes(TOKEN), 0, 1, BLOCK)
        assert not Orders("0.0.0.0", place, time.monotonic, SECONDS).reachable()
        assert "kv_transfer.listen_host" in caplog.text
        caplog.clear()
        assert not Orders("127.0.0.1", place, time.monotonic, SECONDS).reachable()
        assert "does not collect pieces" in caplog.text
        assert "kv_transfer.listen_host" not in caplog.text
