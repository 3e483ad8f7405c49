"""Strangers at the ports of a prefill and a decode server: refused, with no memory taken, while others are served."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import free_ports
from pegboard.plugins.disagg.frames import framed
from pegboard.plugins.disagg.messages import (
    VERSION,
    Facts,
    Hello,
    Message,
    Ping,
    Proof,
    Refuse,
    Want,
    Welcome,
    encode,
)
from pegboard.plugins.kv_handoff.api.protocol import REQUEST
from pegboard.plugins.transfer_tcp.frames import MAGIC, unpack_description
from tests.faults.disagg_strangers import MANNERS, Manner, Recorder, Signed, closed, false_prefill, sends
from tests.faults.disagg_world import DECODE, PREFILL, TIMES, Server
from tests.faults.memory import peak
from tests.faults.test_served_faults import wait_for

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(300)]

SECRET = b"a secret of thirty-two bytes, ok"
MEGABYTES = 24
"""By how much a scheduler's memory may grow while it is attacked."""
CROWD = 1000
SLACK = 10.0
PROMPT = list(range(5, 105))
SAMPLING = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@dataclass
class Pair:
    """Two servers that know a secret, and a port at which decode may look for a prefill server as well."""

    prefill: Server
    decode: Server
    other_port: int
    right: list[int] = field(default_factory=list)
    facts: Facts | None = None
    _room: int = 0

    def body(self, **changed: Any) -> dict[str, Any]:
        self._room += 1
        named = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap, "bootstrap_room": self._room}
        return {"input_ids": PROMPT, "sampling_params": SAMPLING, "cache_salt": str(self._room), **named, **changed}

    def post(self, server: Server, body: Mapping[str, Any]) -> httpx.Response:
        return httpx.post(f"{server.address}/generate", json=body, timeout=60)

    def both(self, **changed: Any) -> list[httpx.Response]:
        body = self.body(**changed)
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda server: self.post(server, body), (self.prefill, self.decode)))

    def works(self, **changed: Any) -> None:
        answers = self.both(**changed)
        assert [one.status_code for one in answers] == [200, 200], [one.text for one in answers]
        assert answers[1].json()["output_ids"] == self.right

    def rooms(self, server: Server) -> dict[str, float]:
        info = httpx.get(f"{server.address}/server_info", timeout=60).json()
        return dict(info["scheduler"]["gate_stats"]["disagg"])

    @contextlib.contextmanager
    def unharmed(self) -> Iterator[None]:
        """Both serve as before afterwards, in the same processes, which have never had more memory than before."""
        processes = [self.prefill.scheduler, self.decode.scheduler]
        before = [peak(one.pid, anew=True) for one in processes]
        logged = [len(one.served.log()) for one in (self.prefill, self.decode)]
        yield
        self.works()
        assert [self.prefill.scheduler, self.decode.scheduler] == processes
        grown = [(peak(one.pid) - size) / 2**20 for one, size in zip(processes, before, strict=True)]
        assert max(grown) < MEGABYTES, grown
        for server, length in zip((self.prefill, self.decode), logged, strict=True):
            said = server.served.log()[length:]
            assert "Traceback" not in said, said
            assert len(said) < 100_000, "an attacker may fill the log"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    prefill = Server.of(model, PREFILL, secret_file=str(file))
    (other_port,) = free_ports(1)
    recorder = Recorder(prefill.bootstrap)
    known = [f"{host}:{prefill.bootstrap}" for host in ("127.0.0.1", "localhost")]
    known += [f"127.0.0.1:{other_port}", f"127.0.0.1:{recorder.port}"]
    decode = Server.of(model, DECODE, secret_file=str(file), peers=known)
    with contextlib.ExitStack() as stack:
        for server in (prefill, decode):
            stack.callback(server.close)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(Server.start, (prefill, decode)))
        pair = Pair(prefill, decode, other_port)
        pair.right = pair.post(prefill, {"input_ids": PROMPT, "sampling_params": SAMPLING}).json()["output_ids"]
        with contextlib.closing(recorder):
            pair.works(bootstrap_port=recorder.port)
            (proof,) = [one for one in recorder.messages if isinstance(one, Proof)]
            pair.facts = proof.facts
        for _ in range(10):
            pair.works()
        yield pair


# ---- the bootstrap port ----------------------------------------------------------------------------------------------


def test_rubbish(pair: Pair) -> None:
    chance = random.Random(1)
    early: list[Message] = [Want(1, 0, 1, 5), Ping(1), Refuse("no"), Welcome(Facts(b"", {}, "", (), ()), b"")]
    early += [Hello(VERSION, "prefill", b"i" * 16, b"n" * 32), Hello(VERSION + 1, "decode", b"i" * 16, b"n" * 32)]
    early += [Hello(VERSION, "decode", b"", b""), Proof(Facts(b"", {}, "", (), ()), b"")]
    with pair.unharmed():
        for message in early:
            sends(pair.prefill.bootstrap, framed(encode(message)))
        for body in (b"", b"\xc1", b"\x91" * 60_000, b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xffx", bytes(65_536)):
            sends(pair.prefill.bootstrap, framed(body))
        for _ in range(100):
            sends(pair.prefill.bootstrap, framed(chance.randbytes(chance.randrange(1, 2000))))


def test_a_frame_of_four_gigabytes(pair: Pair) -> None:
    """Its length alone ends the connection, before anything else has come. So it does for one that is signed."""
    with pair.unharmed():
        for length in (2**32 - 1, 2**31, 64 * 2**10 + 1):
            assert sends(pair.prefill.bootstrap, struct.pack(">I", length)) == b""
            sends(pair.prefill.bootstrap, struct.pack(">I", length) + bytes(2**26))
        with signed(pair) as one, contextlib.suppress(ConnectionError):
            one.connection.sendall(struct.pack(">I", 2**32 - 1) + bytes(2**26))
            closed(one.connection)


def signed(pair: Pair) -> Signed:
    assert pair.facts is not None
    return Signed(pair.prefill.bootstrap, SECRET, pair.facts)


@pytest.mark.parametrize("secret", [b"", b"another secret, of as many bytes", SECRET[:-1]])
def test_a_wrong_signature(pair: Pair, secret: bytes) -> None:
    """Prefill signs first; a stranger that does not look at that, and sends a proof of its own, learns no more."""
    assert pair.facts is not None
    connections = pair.rooms(pair.prefill)["connections"]
    with pair.unharmed():
        with Signed(pair.prefill.bootstrap, secret, pair.facts) as one:
            assert one.link.over
            assert "the signature differs" in one.link.reason
        hello = Hello(VERSION, "decode", b"i" * 16, b"n" * 32)
        said = sends(pair.prefill.bootstrap, framed(encode(hello)) + framed(encode(Proof(pair.facts, b"m" * 32))))
        assert b"welcome" not in said
        assert b"the signature differs" in said
    assert pair.rooms(pair.prefill)["connections"] == connections


def test_a_replayed_handshake(pair: Pair) -> None:
    """What a decode server has sent before is of no use: the other side's nonce is another one."""
    with contextlib.closing(Recorder(pair.prefill.bootstrap)) as recorder, pair.unharmed():
        with Signed(recorder.port, SECRET, signed(pair).facts) as one:
            assert one.link.peer is not None
        said = sends(pair.prefill.bootstrap, bytes(recorder.sent))
        assert b"welcome" not in said
        assert b"the signature differs" in said


def test_other_models_are_refused_with_the_reason(pair: Pair) -> None:
    facts = msgspec.structs.replace(signed(pair).facts, identity=b"other", described={"dtype": "float8"})
    with pair.unharmed(), Signed(pair.prefill.bootstrap, SECRET, facts) as one:
        assert "KV differs" in one.link.reason
        assert "float8 on decode" in one.link.reason


@pytest.mark.parametrize("port", ["bootstrap", "data"])
def test_a_thousand_connections(pair: Pair, port: str) -> None:
    """That stay, and say nothing: requests are answered meanwhile, also over a connection that is made anew."""
    with pair.unharmed(), contextlib.ExitStack() as stack:
        for number in range(CROWD):
            stack.enter_context(socket.create_connection(("127.0.0.1", getattr(pair.prefill, port)), 30))
            if number % 50 == 0:
                # Some may have been accepted and not been closed yet.
                until = time.monotonic() + 10
                while (opened := pair.prefill.scheduler.num_fds()) >= 250 and time.monotonic() < until:
                    time.sleep(0.05)
                assert opened < 250
        pair.works()
        pair.works(bootstrap_host="localhost")


@pytest.mark.parametrize("port", ["bootstrap", "data"])
def test_slow_senders(pair: Pair, port: str) -> None:
    """A byte now and then: they have as long as anyone for their hello, and no longer."""
    begun = time.monotonic()
    with pair.unharmed(), contextlib.ExitStack() as stack:
        at = ("127.0.0.1", getattr(pair.prefill, port))
        still = [stack.enter_context(socket.create_connection(at)) for _ in range(20)]
        while still:
            assert time.monotonic() - begun < 5.0 + SLACK, f"{len(still)} are still connected"
            for one in list(still):
                try:
                    one.sendall(b"\0")
                    one.settimeout(0.01)
                    if not one.recv(4096):
                        still.remove(one)
                except TimeoutError:
                    pass
                except OSError:
                    still.remove(one)
            pair.works()


def test_a_signed_peer_that_asks_for_too_many_rooms(pair: Pair) -> None:
    """It has half of the places, and is told no after that; others have the other half."""
    with pair.unharmed():
        with signed(pair) as one:
            threading.Thread(target=one.listen, daemon=True).start()
            one.say([Want(2**62 + number, 0, 1, 5) for number in range(10_000)])
            wait_for(lambda: pair.rooms(pair.prefill)["rooms_refused_total"] >= 10_000 - 2048)
            assert pair.rooms(pair.prefill)["rooms_wanted_before_they_came"] == 2048
            # Decode asks first here, so that its question needs a place.
            body = pair.body()
            with ThreadPoolExecutor(1) as threads:
                answer = threads.submit(pair.post, pair.decode, body)
                wait_for(lambda: pair.rooms(pair.prefill)["rooms_wanted_before_they_came"] == 2049)
                assert pair.post(pair.prefill, body).status_code == 200
                assert answer.result().json()["output_ids"] == pair.right
        # When it has gone they are forgotten, after the grace for its return.
        wait_for(lambda: not pair.rooms(pair.prefill)["rooms_wanted_before_they_came"])


# ---- the data port ---------------------------------------------------------------------------------------------------


def test_strangers_at_the_data_port(pair: Pair) -> None:
    chance = random.Random(2)
    with pair.unharmed():
        for data in (b"GET / HTTP/1.1\r\n\r\n".ljust(40), MAGIC + bytes(32), chance.randbytes(40), bytes(2**20)):
            assert sends(pair.prefill.data, data) == b""
        for _ in range(100):
            assert sends(pair.prefill.data, MAGIC + chance.randbytes(32)) == b""


def test_requests_that_cannot_be(pair: Pair) -> None:
    """From one that knows the token: what is too large ends the connection, and what is not allowed is not sent."""
    with signed(pair) as one:
        assert one.link.peer is not None
        port, token = unpack_description(one.link.peer.description)
    hello = MAGIC + token
    assert port == pair.prefill.data
    with pair.unharmed():
        for lease, total, count in ((1, 5, 2**32 - 1), (1, 2**64 - 1, 1), (1, 2**41, 1)):
            assert sends(port, hello + REQUEST.pack(1, lease, total, count)) == MAGIC
        for region, offset, nbytes in ((0, 0, 64), (10**6, 0, 64), (-1, 0, 64), (0, -64, 64), (0, 2**62, 64)):
            piece = struct.pack("<qqi", offset, nbytes, region)
            with socket.create_connection(("127.0.0.1", port), 30) as connection:
                connection.sendall(hello + REQUEST.pack(7, 12345, 64, 1) + piece)
                said = b""
                while len(said) < len(MAGIC) + 24:
                    said += connection.recv(1024)
                assert said == MAGIC + struct.pack("<QQQ", 7, 1, 0), "no lease, no bytes"


# ---- the decode server -----------------------------------------------------------------------------------------------


def test_foreign_hosts(pair: Pair) -> None:
    """What is not among `peers` is refused, and nothing is connected to, however it is written."""
    with contextlib.ExitStack() as stack:
        port = pair.prefill.bootstrap
        there = stack.enter_context(socket.create_server(("127.0.0.9", port)))
        other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        hosts = ["127.0.0.9", "10.0.0.1", "0.0.0.0", "2130706433", "0x7f000001", "127.1", "::1", "::ffff:127.0.0.1"]
        hosts += ["127.0.0.1.evil.test", "evil.test", " 127.0.0.1", "127.0.0.1 ", "127.0.0.1@127.0.0.9", "localhost."]
        hosts += ["127.0.0.1:80", "127.0.0.1/", "169.254.169.254", "[127.0.0.1]", "*", "127.0.0.*"]
        with pair.unharmed():
            for host in hosts:
                answer = pair.post(pair.decode, pair.body(bootstrap_host=host))
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "peer_not_allowed"), answer.text
            for wrong in (other.getsockname()[1], 1, None):
                answer = pair.post(pair.decode, pair.body(bootstrap_port=wrong))
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "peer_not_allowed"), answer.text
        for one in (there, other):
            one.settimeout(0.5)
            with pytest.raises(TimeoutError):
                one.accept()


@pytest.mark.parametrize("manner", MANNERS)
def test_false_prefill_servers(pair: Pair, manner: Manner) -> None:
    """At an address that decode may connect to: a request fails in time, and takes no memory."""
    with false_prefill(pair.other_port, manner), pair.unharmed():
        begun = time.monotonic()
        answer = pair.post(pair.decode, pair.body(bootstrap_port=pair.other_port))
        assert answer.status_code in (409, 502), answer.text
        assert answer.json()["error"]["code"] in ("prefill_refused", "prefill_unreachable")
        assert time.monotonic() - begun < TIMES["connect_timeout"] + SLACK


ROOMS: list[Any] = [-1, 2**63, 2**70, 1.5, "7", True, [], {}, None]
PORTS: list[Any] = [0, 65536, -1, 2**70, "80", 80.5, False, [], {}]
HOSTS: list[Any] = ["", "x" * 256, "a\nb", "a\0b", 7, True, [], {}]
MALFORMED: list[dict[str, Any]] = [
    *({"bootstrap_room": one} for one in ROOMS),
    *({"bootstrap_port": one} for one in PORTS),
    *({"bootstrap_host": one} for one in HOSTS),
    {"bootstrap_room": [1, 2, 3], "sampling_params": {**SAMPLING, "n": 2}},
]


def test_malformed_fields(pair: Pair) -> None:
    """Both sides refuse them, in the same way."""
    with pair.unharmed():
        for changed in MALFORMED:
            answers = pair.both(**changed)
            assert [one.status_code for one in answers] == [400, 400], (changed, [one.text for one in answers])


def test_rooms_in_use(pair: Pair) -> None:
    """A second request for a room is refused on either side, and the first one is answered."""
    with pair.unharmed(), ThreadPoolExecutor(1) as threads:
        body = pair.body()
        first = threads.submit(pair.post, pair.decode, body)
        wait_for(lambda: pair.rooms(pair.decode)["rooms"] == 1)
        answer = pair.post(pair.decode, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "room_in_use")
        answers = [pair.post(pair.prefill, body).status_code]
        assert first.result().json()["output_ids"] == pair.right
        body = pair.body()
        answers += [pair.post(pair.prefill, body).status_code for _ in range(2)]
        assert answers == [200, 200, 409], "held for a decode server"
        assert pair.post(pair.decode, body).json()["output_ids"] == pair.right
