"""Connections whose ends share a key: who knows it gets in, and nobody else, whatever they say or do not say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from pegboard.core.interfaces.errors import PegboardError
from pegboard.toolkit.system import keyed_sockets
from pegboard.toolkit.system.keyed_sockets import KEY, PROOF, KeyedListener, connect, listen, new_key

HOST = "127.0.0.1"
SECONDS = 30.0


@pytest.fixture
def listener() -> Iterator[KeyedListener]:
    made = KeyedListener(HOST)
    yield made
    made.close()


def ended(connection: socket.socket) -> bytes:
    """Return all that comes until the other end closes a connection."""
    connection.settimeout(SECONDS)
    found = b""
    try:
        while data := connection.recv(1000):
            found += data
    except ConnectionError:
        pass
    return found


def test_each_gets_the_connection_with_its_key(listener: KeyedListener) -> None:
    keys = [new_key() for _ in range(8)]
    coming = [listener.expect(key) for key in keys]
    with ThreadPoolExecutor(8) as threads:
        ours = list(threads.map(lambda key: connect(listener.address, key), reversed(keys)))
    for index, connection in enumerate(reversed(ours)):
        with connection, coming[index].result(SECONDS) as theirs:
            assert connection.getsockname() == theirs.getpeername()
            connection.sendall(b"there")
            assert theirs.recv(100) == b"there"
            theirs.sendall(b"and back")
            assert connection.recv(100) == b"and back"


def test_what_is_sent_at_once_is_not_lost(listener: KeyedListener) -> None:
    key = new_key()
    coming = listener.expect(key)
    with connect(listener.address, key) as connection:
        connection.sendall(b"a message")
        with coming.result(SECONDS) as theirs:
            theirs.sendall(b"x" * 1000)
            assert theirs.recv(100) == b"a message"
            assert theirs.gettimeout() is None
            assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_another_key(listener: KeyedListener) -> None:
    coming = listener.expect(new_key())
    with pytest.raises(PegboardError, match="has ended the connection before it was accepted"):
        connect(listener.address, new_key())
    assert not coming.done()


def test_a_key_opens_once(listener: KeyedListener) -> None:
    key = new_key()
    coming = listener.expect(key)
    with connect(listener.address, key), coming.result(SECONDS), pytest.raises(PegboardError, match="has ended"):
        connect(listener.address, key)


def test_one_that_is_not_expected_any_more(listener: KeyedListener) -> None:
    key = new_key()
    assert listener.expect(key).cancel()
    with pytest.raises(PegboardError, match="has ended the connection"):
        connect(listener.address, key)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(PROOF), b"x" * 100_000])
def test_who_says_something_else_is_cut_off(listener: KeyedListener, said: bytes) -> None:
    coming = listener.expect(key := new_key())
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(said)
        assert len(ended(stranger)) <= KEY, "it learns a nonce and nothing else"
    with connect(listener.address, key), coming.result(SECONDS):
        pass


def test_half_a_proof_is_waited_for_and_not_for_long(listener: KeyedListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_sockets, "STRANGER_SECONDS", 0.5)
    with (
        socket.create_connection(listener.address) as silent,
        socket.create_connection(listener.address) as slow,
    ):
        slow.sendall(bytes(PROOF - 1))
        assert len(ended(silent)) == KEY
        assert len(ended(slow)) == KEY


def test_a_proof_of_an_earlier_connection(listener: KeyedListener) -> None:
    """It was recorded on the way: the nonce is another one by then."""
    key = new_key()
    coming = listener.expect(key)
    recorded = bytearray()
    with listen(HOST) as between:

        def pass_on() -> None:
            with between.accept()[0] as one, socket.create_connection(listener.address) as other:
                one.sendall(other.recv(KEY, socket.MSG_WAITALL))
                recorded.extend(one.recv(PROOF, socket.MSG_WAITALL))
                other.sendall(recorded)
                one.sendall(other.recv(KEY, socket.MSG_WAITALL))

        passing = threading.Thread(target=pass_on)
        passing.start()
        with connect((HOST, between.getsockname()[1]), key), coming.result(SECONDS):
            passing.join()
    coming = listener.expect(key)
    with socket.create_connection(listener.address) as again:
        again.recv(KEY, socket.MSG_WAITALL)
        again.sendall(recorded)
        assert ended(again) == b""
    assert not coming.done()


def test_a_listener_that_does_not_know_the_key() -> None:
    """Only who knows the key can answer: the proof sent back is none."""
    with listen(HOST) as false:

        def answer() -> None:
            with false.accept()[0] as one:
                one.sendall(bytes(KEY))
                proof = one.recv(PROOF, socket.MSG_WAITALL)
                one.sendall(proof[KEY:])
                ended(one)

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(PegboardError, match="does not know the key"):
            connect((HOST, false.getsockname()[1]), new_key())
        answering.join()


def test_many_strangers_keep_nobody_out(listener: KeyedListener) -> None:
    strangers = [socket.create_connection(listener.address) for _ in range(keyed_sockets.MOST_STRANGERS + 20)]
    try:
        key = new_key()
        coming = listener.expect(key)
        with connect(listener.address, key), coming.result(SECONDS):
            assert len(ended(strangers[0])) <= KEY, "the oldest has made way"
    finally:
        for stranger in strangers:
            stranger.close()


def test_close_ends_strangers_and_nobody_else() -> None:
    listener = KeyedListener(HOST)
    key = new_key()
    coming = listener.expect(key)
    with connect(listener.address, key) as ours, coming.result(SECONDS) as theirs:
        stranger = socket.create_connection(listener.address)
        listener.close()
        listener.close()
        assert len(ended(stranger)) <= KEY
        stranger.close()
        ours.sendall(b"x")
        assert theirs.recv(10) == b"x"
    with pytest.raises(PegboardError, match="does not answer at port"):
        connect(listener.address, key)


def test_an_address_that_is_not_this_machines() -> None:
    with pytest.raises(PegboardError, match=r"cannot listen at '192\.0\.2\.1'"):
        listen("192.0.2.1")
