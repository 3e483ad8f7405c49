"""The listener and its connections, over real sockets on loopback."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
import pytest

from pegboard.plugins.disagg.connection import Connection
from pegboard.plugins.disagg.events import Address, Event, Failed, Lost, Opened, Said
from pegboard.plugins.disagg.gate import listen
from pegboard.plugins.disagg.handshake import Answering, Self
from pegboard.plugins.disagg.link import Link, LinkLimits
from pegboard.plugins.disagg.messages import Facts, Gone, Want
from pegboard.plugins.disagg.network import NetworkLimits, ThreadedNetwork

E = TypeVar("E")
FACTS = Facts(b"identity", {"dtype": "bfloat16"}, "Engine", (2, 2), (4, 4))
QUICK = NetworkLimits(connections=8, link=LinkLimits(opening=1.0, ping=0.6))
PATIENCE = 15.0


@dataclass
class Ear:
    """A network, and what it has told so far."""

    network: ThreadedNetwork
    heard: list[Event] = field(default_factory=list)

    def wait_for(self, kind: type[E], number: int = 1) -> E:
        """Return the event of this kind that comes as the `number`th, counted from 1."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            self.heard += self.network.events()
            found: Sequence[E] = [one for one in self.heard if isinstance(one, kind)]
            if len(found) >= number:
                return found[number - 1]
            time.sleep(0.01)
        pytest.fail(f"no {kind.__name__} in {PATIENCE} s, only {self.heard}")


@pytest.fixture
def servers() -> Iterator[Callable[..., Ear]]:
    """Make networks that are closed at the end."""
    names = itertools.count(1)
    with contextlib.ExitStack() as stack:

        def make(role: str, *, secret: bytes = b"", facts: Facts = FACTS, at: int = 0) -> Ear:
            own = Self(role, f"{role}-{next(names)}".encode().ljust(16, b"."), facts, b"description", secret)
            listening = listen(f"127.0.0.1:{at}") if role == "prefill" else None
            ear = Ear(ThreadedNetwork(own, QUICK, listening))
            stack.callback(ear.network.close)
            return ear

        yield make


def address(ear: Ear) -> Address:
    return Address("127.0.0.1", ear.network.port)


def test_two_servers_meet_and_talk(servers: Callable[..., Ear]) -> None:
    prefill, decode = servers("prefill", secret=b"s" * 16), servers("decode", secret=b"s" * 16)
    for _ in range(3):
        decode.network.dial(address(prefill))
    here, there = decode.wait_for(Opened), prefill.wait_for(Opened)
    assert (here.address, here.peer.description) == (address(prefill), b"description")
    assert there.address is None
    for number in range(100):
        decode.network.send(here.link, Want(number, 0, 1, 5))
    assert prefill.wait_for(Said, 100).message == Want(99, 0, 1, 5)
    prefill.network.send(there.link, Gone(7, 0, 1, 0))
    assert decode.wait_for(Said).message == Gone(7, 0, 1, 0)
    decode.network.close()
    assert prefill.wait_for(Lost).link == there.link
    assert sum(isinstance(one, Opened) for one in prefill.heard) == 1, "one connection for all rooms"


def test_an_idle_connection_lasts(servers: Callable[..., Ear]) -> None:
    prefill, decode = servers("prefill"), servers("decode")
    decode.network.dial(address(prefill))
    link = decode.wait_for(Opened).link
    time.sleep(2.5)
    decode.network.send(link, Want(1, 0, 1, 5))
    prefill.wait_for(Said)
    assert not any(isinstance(one, Lost) for one in [*decode.heard, *prefill.heard])


def test_a_server_that_is_not_there_fails_at_once_and_is_tried_again(servers: Callable[..., Ear]) -> None:
    decode = servers("decode")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    decode.network.dial(Address("127.0.0.1", port))
    failed = decode.wait_for(Failed)
    assert (failed.address.port, failed.status) == (port, 502)
    assert f"{failed.address} cannot be connected to: " in failed.reason
    prefill = servers("prefill", at=port)
    decode.network.dial(address(prefill))
    decode.wait_for(Opened)


def test_a_server_that_accepts_and_says_nothing(servers: Callable[..., Ear]) -> None:
    decode = servers("decode")
    with socket.create_server(("127.0.0.1", 0)) as mute:
        decode.network.dial(Address("127.0.0.1", mute.getsockname()[1]))
        assert "no handshake" in decode.wait_for(Failed).reason


def test_what_does_not_go_together_is_refused_with_the_reason(servers: Callable[..., Ear]) -> None:
    prefill = servers("prefill")
    other = Facts(b"other", {"dtype": "float32"}, "Engine", (2, 2), (4, 4))
    decode = servers("decode", facts=other)
    decode.network.dial(address(prefill))
    failed = decode.wait_for(Failed)
    assert (failed.status, failed.code) == (409, "prefill_refused")
    assert failed.reason.startswith(f"the prefill server {address(prefill)} and this decode server do not go together")
    assert "dtype: bfloat16 on prefill, float32 on decode" in failed.reason
    assert "connected" not in failed.reason, "it was"
    assert not prefill.network.events()


def test_a_peer_that_is_stopped_is_lost(servers: Callable[..., Ear]) -> None:
    """One whose system takes bytes, and which answers none."""
    decode = servers("decode")
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        decode.network.dial(Address("127.0.0.1", stopped.getsockname()[1]))
        taken, _ = stopped.accept()
        with taken:
            own = Self("prefill", b"prefill".ljust(16, b"."), FACTS, b"description")
            link = Link(Answering(own), time.monotonic())
            while link.peer is None:
                link.receive(taken.recv(4096), time.monotonic())
                taken.sendall(link.output())
            decode.wait_for(Opened)
            assert "nothing heard" in decode.wait_for(Lost).reason


def test_health_checks_are_answered(servers: Callable[..., Ear]) -> None:
    port = servers("prefill").network.port
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    assert httpx.head(f"http://127.0.0.1:{port}/health?x=1").status_code == 200
    assert httpx.get(f"http://127.0.0.1:{port}/other").status_code == 404
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nx: " + b"y" * 20_000)
        slow.settimeout(PATIENCE)
        assert slow.recv(100).startswith(b"HTTP/1.1 431")


def test_attackers_are_shown_the_door_and_others_are_served(servers: Callable[..., Ear]) -> None:
    """Rubbish, long frames, slow senders and many connections at once."""
    prefill = servers("prefill")
    at = address(prefill)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(at)) for _ in range(60)]
        for rubbish in (b"\0\0\0\5rubbi", struct.pack(">I", 2**32 - 1), b"\x16\x03\x01\x02\x00", b"G"):
            stack.enter_context(socket.create_connection(at)).sendall(rubbish)
        decode = servers("decode")
        decode.network.dial(at)
        link = decode.wait_for(Opened).link
        decode.network.send(link, Want(1, 0, 1, 5))
        prefill.wait_for(Said)
        for one in idle:
            one.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionError):
                assert not one.recv(10), "a silent connection is closed"


def test_messages_that_are_not_asked_for_are_left_out(
    servers: Callable[..., Ear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pegboard.plugins.disagg.network.MAX_EVENTS", 50)
    prefill, decode = servers("prefill"), servers("decode")
    decode.network.dial(address(prefill))
    link = decode.wait_for(Opened).link
    for number in range(200):
        decode.network.send(link, Want(number, 0, 1, 5))
    until = time.monotonic() + PATIENCE
    while prefill.network.left_out < 151 and time.monotonic() < until:
        time.sleep(0.01)
    events = list(prefill.network.events())
    assert isinstance(events[0], Opened), "that it came is never left out"
    assert [one.message.room for one in events[1:] if isinstance(one, Said)] == list(range(151, 200))


def test_a_connection_that_fails_at_a_tick_ends_alone(
    servers: Callable[..., Ear], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ticks of others go on, or nobody would be found silent any more."""
    prefill, decode = servers("prefill"), servers("decode")
    decode.network.dial(address(prefill))
    decode.wait_for(Opened)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise ValueError("a tick")

        patch.setattr(Connection, "tick", fail)
        decode.wait_for(Lost)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        decode.network.dial(Address("127.0.0.1", mute.getsockname()[1]))
        assert "no handshake" in decode.wait_for(Failed).reason
    decode.network.dial(address(prefill))
    decode.wait_for(Opened, 2)


def test_closing_twice_and_calls_after_it(servers: Callable[..., Ear]) -> None:
    ear = servers("prefill")
    ear.network.close()
    ear.network.close()
    ear.network.dial(Address("127.0.0.1", 1))
    ear.network.send(1, Gone(1, 0, 1, 0))
    with pytest.raises(OSError):
        socket.create_connection(address(ear), timeout=1.0)
