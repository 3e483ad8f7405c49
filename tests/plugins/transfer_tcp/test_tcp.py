"""Sources and readers of KV over TCP that do what they must not, or nothing at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest

from pegboard.plugins.kv_handoff.api.listening import MOST_STRANGERS, TOKEN
from pegboard.plugins.kv_handoff.api.protocol import REQUEST, pack_request
from pegboard.plugins.kv_handoff.api.transfer import KVTransferContext, Region, TransferError, TransferState
from pegboard.plugins.kv_handoff.suite.rig import LEASE, Server, ranges
from pegboard.plugins.transfer_tcp.frames import (
    ANSWER,
    END,
    HELLO,
    MAGIC,
    MAX_RANGES,
    Status,
    pack_description,
    unpack_description,
)
from pegboard.plugins.transfer_tcp.options import TcpOptions
from pegboard.plugins.transfer_tcp.transfer import TcpTransfer
from tests.plugins.kv_handoff.toy import Clock

SIZE = 6 * 2**20
PATIENCE = 20.0
SOME = ranges([(0, 0, 1000)])
ALL = ranges([(0, 0, SIZE)])


@dataclass
class World:
    """Servers of a test, and a clock of all of them."""

    clock: Clock = field(default_factory=Clock)
    made: list[Server] = field(default_factory=list)

    def server(self, options: TcpOptions | None = None) -> Server:
        """Return a server that lets others read under LEASE."""

        def build(ctx: KVTransferContext) -> TcpTransfer:
            return TcpTransfer(options or TcpOptions(), KVTransferContext(ctx.regions, self.clock))

        made = Server([SIZE], build, seed=len(self.made))
        made.engine.allow(LEASE)
        self.made.append(made)
        return made


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for one in world.made:
        one.engine.close()
        one.check_guards()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("kv-")]


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.002)


def exactly(connection: socket.socket, count: int) -> bytes:
    """Receive so many bytes, or fewer where the other end closes (MSG_WAITALL minds no timeouts)."""
    found = b""
    while len(found) < count and (more := connection.recv(count - len(found))):
        found += more
    return found


def closed(connection: socket.socket) -> bool:
    """Return whether the other end closes it, whatever it sends before."""
    connection.settimeout(PATIENCE)
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


class TestSource:
    """What a source makes of connections that are not readers'."""

    @staticmethod
    def dial(server: Server, hello: bytes | None = None) -> socket.socket:
        """Connect, with the right token unless `hello` is something else."""
        port, token = unpack_description(server.engine.describe())
        made = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        made.sendall(MAGIC + token if hello is None else hello)
        if hello is None:
            assert exactly(made, len(MAGIC)) == MAGIC
        return made

    def check_serves(self, world: World, server: Server) -> None:
        reader = world.server()
        reader.connect(server)
        assert reader.wait([reader.read(SOME, SOME)], PATIENCE) == [TransferState.DONE]
        assert np.array_equal(reader.bytes_at(SOME), server.bytes_at(SOME))

    @pytest.mark.parametrize(
        "hello",
        [MAGIC + bytes(TOKEN), b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(20), bytes(4096), b"\xff" * HELLO],
        ids=["another token", "HTTP", "zeros", "ones"],
    )
    def test_strangers_are_sent_away(self, world: World, hello: bytes) -> None:
        server = world.server()
        with self.dial(server, hello) as connection:
            assert closed(connection)
        until(lambda: server.engine.stats().get("refused_connections_total") == 1, "a stranger is not counted")
        self.check_serves(world, server)

    def test_a_token_with_one_wrong_byte(self, world: World) -> None:
        server = world.server()
        _, token = unpack_description(server.engine.describe())
        for at in (0, TOKEN - 1):
            wrong = bytearray(token)
            wrong[at] ^= 1
            with self.dial(server, MAGIC + bytes(wrong)) as connection:
                assert connection.recv(1) == b""

    def test_silent_strangers_make_way(self, world: World) -> None:
        """The first ones for the last ones, and all of them for readers."""
        server = world.server(TcpOptions(connect_timeout=1000.0))
        reader = world.server()
        reader.connect(server)
        assert reader.wait([reader.read(SOME, SOME)], PATIENCE) == [TransferState.DONE]
        with contextlib.ExitStack() as stack:
            for _ in range(MOST_STRANGERS + 10):
                stack.enter_context(self.dial(server, b""))
            until(lambda: server.engine.stats().get("refused_connections_total", 0) >= 10, "all strangers are let in")
            assert reader.wait([reader.read(SOME, SOME)], PATIENCE) == [TransferState.DONE]
            self.check_serves(world, server)
            assert server.engine.stats()["refused_connections_total"] < MOST_STRANGERS

    def test_without_descriptors_nothing_stays_behind(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """They run out at the second of a peer's connections; the fixture looks for threads."""
        source, reader = world.server(), world.server(TcpOptions(connections=3))
        made, real = itertools.count(), socket.socketpair

        def socketpair() -> tuple[socket.socket, socket.socket]:
            if next(made):
                raise OSError(24, "Too many open files")
            return real()

        with monkeypatch.context() as patch:
            patch.setattr(socket, "socketpair", socketpair)
            with pytest.raises(TransferError, match=r"no connection can be made: .*Too many open files"):
                reader.connect(source)
        until(
            lambda: not [one for one in threading.enumerate() if one.name.startswith("kv-read")], "threads have ended"
        )
        reader.connect(source)
        assert reader.wait([reader.read(SOME, SOME)], PATIENCE) == [TransferState.DONE]

    def test_machines_that_are_gone_without_a_word_are_noticed(self, world: World) -> None:
        source, reader = world.server(), world.server()
        reader.connect(source)
        assert reader.wait([reader.read(SOME, SOME)], PATIENCE) == [TransferState.DONE]
        here = psutil.Process().net_connections("tcp4")
        port, _ = unpack_description(source.engine.describe())
        accepted = [one.fd for one in here if one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED]
        assert accepted
        for fd in accepted:
            with socket.socket(fileno=os.dup(fd)) as connection:
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    def test_a_hello_has_to_come_in_time(self, world: World) -> None:
        """All of it: bytes that drip gain nothing."""
        server = world.server(TcpOptions(connect_timeout=1.0))
        _, token = unpack_description(server.engine.describe())
        with self.dial(server, b"") as connection:
            assert closed(connection)
        with self.dial(server, b"") as connection, contextlib.suppress(ConnectionError):
            for byte in MAGIC + token:
                connection.sendall(bytes([byte]))
                time.sleep(0.1)
            assert connection.recv(1) == b""
        self.check_serves(world, server)

    @pytest.mark.parametrize(
        "frame",
        [
            REQUEST.pack(1, LEASE, 2**63, 1),
            REQUEST.pack(1, LEASE, 10, MAX_RANGES + 1),
            REQUEST.pack(1, LEASE, 10, 2**32 - 1),
            REQUEST.pack(1, LEASE, 11, 1) + struct.pack("<qqi", 0, 10, 0),
            REQUEST.pack(1, LEASE, 10, 2) + struct.pack("<qqqqii", 0, 0, 20, -10, 0, 0),
            REQUEST.pack(1, LEASE, 10, 2) + struct.pack("<qqqqii", 0, 0, 2**63 - 1, 2**63 - 1, 0, 0),
            REQUEST.pack(1, LEASE, 0, 1) + struct.pack("<qqi", 0, 0, 0),
        ],
        ids=["bytes", "pieces", "most pieces", "another sum", "negative", "overflow", "an empty piece"],
    )
    def test_bad_requests_end_the_connection(self, world: World, frame: bytes) -> None:
        server = world.server()
        with self.dial(server) as connection:
            connection.sendall(frame)
            assert closed(connection)
        self.check_serves(world, server)

    def test_requests_come_in_bits(self, world: World) -> None:
        server = world.server()
        with self.dial(server) as connection:
            for byte in pack_request(3, LEASE, SOME):
                connection.sendall(bytes([byte]))
            found = exactly(connection, ANSWER.size + 1000 + END.size)
        assert found == ANSWER.pack(3, 0, 1000) + server.bytes_at(SOME).tobytes() + END.pack(3, 0)

    def test_a_reader_that_takes_nothing_is_given_up(self, world: World) -> None:
        server = world.server(TcpOptions(timeout=0.3))
        with self.dial(server) as connection:
            connection.sendall(pack_request(1, LEASE, ranges([(0, 0, SIZE)] * 20)))
            until(lambda: self.is_reset(connection), "it waits on")
        self.check_serves(world, server)

    @staticmethod
    def is_reset(connection: socket.socket) -> bool:
        """Return whether the source has let go, without reading what it has sent."""
        try:
            connection.send(b"\0")
        except OSError:
            return True
        return False

    def test_a_lease_that_ends_amid_an_answer_gives_no_bytes_any_more(self, world: World) -> None:
        server = world.server()
        server.regions[0][:] = 7
        many = 20
        with self.dial(server) as connection:
            connection.sendall(pack_request(1, LEASE, ranges([(0, 0, SIZE)] * many)))
            assert ANSWER.unpack(exactly(connection, ANSWER.size)) == (1, Status.OK, many * SIZE)
            server.engine.revoke(LEASE)
            server.regions[0][:] = 9
            left, seen = many * SIZE, set[int]()
            while left:
                data = connection.recv(min(left, 2**20))
                left -= len(data)
                seen |= set(np.unique(np.frombuffer(data, np.uint8)).tolist())
            assert END.unpack(exactly(connection, END.size)) == (1, Status.ENDED)
        assert 0 in seen
        assert seen <= {0, 7, 9}


class Liar:
    """Listens like a source, and answers with what a test says."""

    def __init__(self, answers: Sequence[bytes], welcome: bytes = MAGIC) -> None:
        self._answers = list(answers)
        self._welcome = welcome
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.connections: list[socket.socket] = []
        self.asked = 0
        """Requests that have come, one of each connection."""
        threading.Thread(target=self._run, daemon=True).start()

    def describe(self) -> bytes:
        return pack_description(self._listener.getsockname()[1], bytes(TOKEN))

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                with contextlib.suppress(OSError):
                    self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        exactly(connection, HELLO)
        connection.sendall(self._welcome)
        if self._welcome == MAGIC and connection.recv(1):
            self.asked += 1
            for answer in self._answers:
                connection.sendall(answer)

    def close(self) -> None:
        self._listener.close()
        for one in self.connections:
            one.close()


class TestReader:
    """What a reader makes of sources that are not."""

    @staticmethod
    def read(world: World, liar: Liar, options: TcpOptions | None = None) -> tuple[Server, int]:
        reader = world.server(options or TcpOptions(connections=1))
        reader.engine.connect("peer", "127.0.0.1", liar.describe())
        return reader, reader.read(SOME, SOME)

    @pytest.mark.parametrize(
        ("answers", "reason"),
        [
            ([ANSWER.pack(2, 0, 1000)], "request 2 comes where that to 1"),
            ([ANSWER.pack(1, 0, 1001)], "1001 bytes come where 1000"),
            ([ANSWER.pack(1, 0, 2**64 - 1)], "bytes come where 1000"),
            ([ANSWER.pack(1, 9, 1000)], "status 9"),
            ([ANSWER.pack(1, 0, 1000), bytes(1000), END.pack(2, 0)], "request 2 comes where that to 1"),
            ([ANSWER.pack(1, 0, 1000), bytes(1000), END.pack(1, 1)], "lease has ended"),
            ([ANSWER.pack(1, 2, 0)], "beyond the peer's regions"),
        ],
        ids=["number", "more", "most", "status", "last number", "ended", "beyond"],
    )
    def test_answers_that_are_none(self, world: World, answers: Sequence[bytes], reason: str) -> None:
        liar = Liar(answers)
        reader, handle = self.read(world, liar)
        assert reader.wait([handle], PATIENCE) == [TransferState.FAILED]
        assert reason in reader.ended[handle].reason
        liar.close()

    def test_a_welcome_that_is_none(self, world: World) -> None:
        liar = Liar([], welcome=b"HTTP/1.1 400")
        reader, handle = self.read(world, liar)
        assert reader.wait([handle], PATIENCE) == [TransferState.FAILED]
        assert "not a source" in reader.ended[handle].reason
        liar.close()

    @pytest.mark.parametrize("answers", [[], [ANSWER.pack(1, 0, 1000), bytes(500)]], ids=["nothing", "half of it"])
    def test_a_source_that_stops_is_given_up(self, world: World, answers: Sequence[bytes]) -> None:
        """After `timeout`, and not before."""
        liar = Liar(answers)
        reader, handle = self.read(world, liar)
        until(lambda: liar.asked, "no request")
        time.sleep(0.3)
        reader.poll()
        assert not reader.ended
        world.clock.ahead += 10.1
        assert reader.wait([handle], PATIENCE) == [TransferState.FAILED]
        assert "nothing came for 10 s" in reader.ended[handle].reason
        liar.close()

    def test_a_source_that_says_no_welcome_is_given_up(self, world: World) -> None:
        liar = Liar([], welcome=b"")
        reader, handle = self.read(world, liar)
        until(lambda: liar.connections, "no connection")
        world.clock.ahead += 5.1
        assert reader.wait([handle], PATIENCE) == [TransferState.FAILED]
        assert "no connection within 5 s" in reader.ended[handle].reason
        liar.close()

    @pytest.mark.parametrize(("host", "named"), [("0.0.0.0", True), ("127.0.0.1", False)])
    def test_a_source_that_cannot_be_reached(self, world: World, host: str, named: bool) -> None:
        """If it is on another machine, the error names the key. 0.0.0.0 leads here, and is not a loopback address."""
        reader = world.server(TcpOptions(connections=1))
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            reader.engine.connect("peer", host, pack_description(silent.getsockname()[1], bytes(TOKEN)))
            handle = reader.read(SOME, SOME)
            assert reader.wait([handle], PATIENCE) == [TransferState.FAILED]
        assert "Connection refused" in reader.ended[handle].reason
        assert ("set kv_transfer.listen_host on that server" in reader.ended[handle].reason) is named

    def test_what_is_abandoned_is_gone_at_once(self, world: World) -> None:
        """Although its source has stopped: nothing but the reader's own thread writes to its target."""
        liar = Liar([ANSWER.pack(1, 0, 1000), bytes(500)])
        reader, handle = self.read(world, liar)
        until(lambda: reader.engine.stats().get("received_bytes_total", 0) >= 524, "nothing has come")
        reader.engine.abandon(handle)
        assert reader.wait([handle], PATIENCE) == [TransferState.GONE]
        before = reader.copy()
        for one in liar.connections:
            one.sendall(b"x" * 500 + END.pack(1, 0))
        until(lambda: reader.engine.stats()["received_bytes_total"] >= 1040, "the rest has not come")
        assert np.array_equal(before[0], reader.regions[0])
        liar.close()

    def test_a_connection_that_was_lost_is_made_again(self, world: World) -> None:
        """One read fails with it, and the next one finds the peer."""
        liar = Liar([])
        reader, handle = self.read(world, liar)
        until(lambda: liar.asked, "no request")
        liar.connections[0].close()
        assert reader.wait([handle], PATIENCE) == [TransferState.FAILED]
        again = reader.read(SOME, SOME)
        until(lambda: liar.asked == 2, "no second request")
        liar.connections[1].sendall(ANSWER.pack(2, 0, 1000) + b"x" * 1000 + END.pack(2, 0))
        assert reader.wait([again], PATIENCE) == [TransferState.DONE]
        liar.close()

    def test_a_name_that_has_no_address(self, world: World) -> None:
        reader = world.server()
        reader.engine.connect("peer", "a name with spaces.invalid", world.server().engine.describe())
        assert reader.wait([reader.read(SOME, SOME)], PATIENCE) == [TransferState.FAILED]


def test_large_reads_are_shared_between_connections(world: World) -> None:
    source, reader = world.server(), world.server(TcpOptions(connections=4))
    reader.connect(source)
    assert reader.wait([reader.read(ALL, ALL)], PATIENCE) == [TransferState.DONE]
    assert np.array_equal(source.regions[0], reader.regions[0])
    assert source.engine.stats()["served_bytes_total"] == SIZE
    assert reader.engine.stats()["reads_done_total"] == 1
    assert sum(one.name.startswith("kv-send") for one in threading.enumerate()) == 4


def test_readers_alone_do_not_listen(world: World) -> None:
    world.server()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("kv-")]


def test_a_port_that_is_taken_is_told(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = world.server(TcpOptions(listen_port=taken.getsockname()[1]))
        with pytest.raises(OSError, match=r"kv_transfer.listen_host '127.0.0.1', listen_port \d+: .*choose another"):
            server.engine.describe()


def test_other_devices_are_not_supported() -> None:
    region = Region(4096, 4096, 16, 1, device="cuda:0")
    objection = TcpTransfer.supports(TcpOptions(), KVTransferContext((region,)))
    assert objection is not None
    assert "another device" in objection
