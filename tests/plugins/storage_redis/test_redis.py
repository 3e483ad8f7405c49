"""What Redis is asked for, and what it may do."""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pegboard.plugins.kv_tiers.api import KVStorageContext, StorageError
from pegboard.plugins.storage_redis.options import RedisOptions
from pegboard.plugins.storage_redis.pace import Pace
from pegboard.plugins.storage_redis.storage import RedisStorage
from pegboard.toolkit.cache.block_frames import BlockFrames
from tests.plugins.storage_redis.fake_server import PASSWORD, FakeRedis
from tests.plugins.storage_redis.real_server import RealRedis

FAR = float("inf")
IDENTITY = "ab" * 32
KEYS = [bytes([number]) * 32 for number in range(40)]


def content(key: bytes, size: int) -> bytes:
    return bytes(byte ^ position % 251 for position, byte in enumerate((key * (size // 32 + 1))[:size]))


class Rig:
    """A storage, whose blocks have bytes of their own."""

    def __init__(self, url: str, size: int = 100, **options: object) -> None:
        settings = RedisOptions.model_validate({"url": url, "timeout": 5.0, **options})
        self.size = size
        self.storage = RedisStorage(settings, KVStorageContext(IDENTITY, size))

    def put(self, keys: Sequence[bytes], deadline: float = FAR) -> int:
        return self.storage.set(keys, [memoryview(content(key, self.size)) for key in keys], deadline)

    def has(self, keys: Sequence[bytes], deadline: float = FAR) -> int:
        return self.storage.exists(keys, deadline)

    def read(self, keys: Sequence[bytes], deadline: float = FAR) -> int:
        buffers = [memoryview(bytearray(self.size)) for _ in keys]
        count = self.storage.get(keys, buffers, deadline)
        assert [bytes(one) for one in buffers[:count]] == [content(key, self.size) for key in keys[:count]]
        return count


Open = Callable[..., Rig]


@pytest.fixture
def server() -> Iterator[FakeRedis]:
    one = FakeRedis()
    yield one
    one.end()
    assert one.strange == []


@pytest.fixture
def rig(server: FakeRedis) -> Iterator[Open]:
    """What opens storages over the fake server."""
    opened: list[Rig] = []

    def make(size: int = 100, **options: object) -> Rig:
        opened.append(Rig(server.url, size, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.storage.close()


class TestCommands:
    def test_where_a_block_is(self, rig: Open, server: FakeRedis) -> None:
        one = rig(prefix="mine")
        one.put(KEYS[:1])
        block = content(KEYS[0], 100)
        assert server.values == {
            b"mine:" + IDENTITY.encode() + b":" + KEYS[0]: BlockFrames(IDENTITY, 100).header(KEYS[0], block) + block
        }

    def test_blocks_expire_and_are_renewed(self, rig: Open, server: FakeRedis) -> None:
        """What is there is not sent again."""
        one = rig(ttl=600)
        one.put(KEYS[:3])
        for name in server.expiry:
            server.expiry[name] -= 500
        assert one.put(KEYS[:4]) == 4
        assert server.asked["SET"] == 4
        assert all(590 < at - time.monotonic() <= 600 for at in server.expiry.values())

    def test_or_do_not_expire(self, rig: Open, server: FakeRedis) -> None:
        one = rig(ttl=0)
        one.put(KEYS[:3])
        assert one.put(KEYS[:4]) == 4
        assert server.asked["SET"] == 4
        assert not server.expiry

    def test_clear_leaves_the_values_of_others(self, rig: Open, server: FakeRedis) -> None:
        one = rig(size=1)
        server.values.update({b"another:%d" % number: b"else" for number in range(1000)})
        one.put([number.to_bytes(32, "big") for number in range(1500)])
        one.storage.clear()
        assert len(server.values) == 1000
        assert server.asked["SCAN"] > 3


class TestPace:
    @pytest.mark.full
    def test_a_slow_server_is_asked_for_less_at_once(self) -> None:
        pace = Pace(100_000)
        assert pace.blocks == 10
        for _ in range(20):
            pace.note(pace.blocks, pace.blocks * 100_000 / 1e9)
        assert pace.blocks == 83, "8 MiB at most"
        pace.note(83, 8.3)
        assert pace.blocks == 2
        pace.note(2, 100.0)
        assert pace.blocks == 1

    def test_small_ones_are_bounded_too(self) -> None:
        assert Pace(16).blocks == 256


class TestAccess:
    def test_passwords(self, rig: Open, server: FakeRedis) -> None:
        server.wants_password = True
        for options in ({"password": PASSWORD}, {"username": "me", "password": PASSWORD}):
            assert rig(**options).put(KEYS[:1]) == 1
        for options, words in (({"password": "hm"}, "invalid username-password"), ({}, "Authentication required")):
            with pytest.raises(StorageError, match=words) as caught:
                rig(**options).put(KEYS[:1])
            assert "hm" not in str(caught.value)

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("redis://me:secret@host:6379", "they are the options username and password"),
            ("redis://:secret@host", "they are the options username and password"),
            ("rediss://host?ssl_cert_reqs=none", "what can be set are the other options"),
            ("http://host:6379", "begins with redis://, rediss://, unix://"),
            ("host:6379", "begins with redis://"),
            ("unix://", "names a socket"),
            ("redis://host/zero", "the number of a database"),
        ],
    )
    def test_urls_that_are_refused(self, url: str, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            RedisOptions(url=url)

    def test_tls(self, tmp_path: Path) -> None:
        """The server's certificate is looked at; one of another authority is no server of ours."""
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        for name in ("right", "wrong"):
            words = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {name}.key"
            words += f" -out {name}.pem -days 2 -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
            subprocess.run(words.split(), cwd=tmp_path, check=True, capture_output=True)
        server = TlsRedis(tmp_path / "right.pem", tmp_path / "right.key")
        url = server.url.replace("redis://", "rediss://")
        one = Rig(url, tls_ca_file=str(tmp_path / "right.pem"))
        assert one.put(KEYS) == one.read(KEYS) == 40
        for authority in ("", str(tmp_path / "wrong.pem")):
            with pytest.raises(StorageError, match=r"certificate verify failed"):
                Rig(url, tls_ca_file=authority).put(KEYS)
        one.storage.close()
        server.end()


class TlsRedis(FakeRedis):
    def __init__(self, certificate: Path, key: Path) -> None:
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificate, key)
        super().__init__()

    def get_request(self) -> tuple[socket.socket, object]:
        connection, address = super().get_request()
        return self._tls.wrap_socket(connection, server_side=True), address


class TestFaults:
    def test_a_server_that_is_away(self, caplog: pytest.LogCaptureFixture) -> None:
        """The engine starts without it, and uses it when it is back."""
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING):
            one = Rig(f"redis://127.0.0.1:{port}")
        assert "does not answer, so no KV is kept there for now" in caplog.text
        for call in (one.put, one.has, one.read):
            with pytest.raises(StorageError, match="refused"):
                call(KEYS)
        server = FakeRedis(port)
        assert one.put(KEYS) == one.has(KEYS) == one.read(KEYS) == 40
        one.storage.close()
        server.end()

    def test_connections_that_were_lost(self, rig: Open, server: FakeRedis) -> None:
        one = rig()
        one.put(KEYS)
        for call in (one.has, one.read, one.put):
            server.hang_up()
            assert call(KEYS) == 40

    def test_a_server_that_is_silent(self, rig: Open, server: FakeRedis) -> None:
        """Answers that come too late are not taken for those to the next call."""
        one = rig(timeout=0.3)
        one.put(KEYS[:20])
        for number, call in enumerate((one.has, one.read, one.put)):
            server.stop_answering()
            with pytest.raises(StorageError, match=r"has not answered for 0\.3 s"):
                call(KEYS)
            assert call(KEYS, time.monotonic() + 0.05) == 0
            server.going.set()
            assert one.has(KEYS[10:]) == one.read(KEYS[10:]) == 10 if number < 2 else 30
        assert one.read(KEYS) == one.has(KEYS)

    @pytest.mark.parametrize(
        "rubbish",
        [
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            b"*2\r\n$-1\r\n$-1\r\n",
            b":x\r\n",
            b"-ERR gone mad\r\n",
            *(pytest.param(one, marks=pytest.mark.full) for one in (b"\0" * 64, b"$-7\r\n", b"*3\r\n:1\r\n")),
        ],
        ids=repr,
    )
    def test_a_server_that_answers_rubbish(self, rig: Open, server: FakeRedis, rubbish: bytes) -> None:
        one = rig(timeout=0.5)
        one.put(KEYS[:5])
        server.rubbish = rubbish
        for call in (one.has, one.read, one.put):
            with contextlib.suppress(StorageError):
                assert call(KEYS[:5]) == 0
        server.rubbish = b""
        one.put(KEYS)
        assert one.has(KEYS) == one.read(KEYS) == 40

    def test_an_error_leaves_what_other_threads_wait_for(self, rig: Open, server: FakeRedis) -> None:
        """Only the connection that it came over is closed."""
        one, answer = rig(), server.answer
        assert one.put(KEYS[:2]) == 2
        asked, release = threading.Event(), threading.Event()

        def slow(words: list[bytes]) -> bytes:
            if words[0] == b"EXISTS":
                return b"what is this\r\n"
            if words[0] == b"MGET":
                asked.set()
                release.wait(20)
            return answer(words)

        server.answer = slow  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(one.read, KEYS[:2])
            assert asked.wait(20)
            with pytest.raises(StorageError):
                one.has(KEYS[:2])
            count = server.asked["MGET"]
            release.set()
            assert found.result(20) == 2
        assert server.asked["MGET"] == count + 1, "it was not asked again"
        server.answer = answer  # type: ignore[method-assign]
        assert one.has(KEYS[:2]) == 2

    def test_a_full_server(self, rig: Open, server: FakeRedis, caplog: pytest.LogCaptureFixture) -> None:
        """What it has no room for is dropped; that is not an error."""
        one = rig()
        one.put(KEYS[:3])
        server.full = True
        assert one.put(KEYS[:8]) == 3
        assert one.put(KEYS[8:]) == 0
        assert one.storage.stats() == {"damaged": 0, "dropped": 2}
        assert caplog.text.count("maxmemory-policy allkeys-lru") == 1

    @pytest.mark.full
    def test_a_slow_server(self, rig: Open, server: FakeRedis) -> None:
        """What came until the deadline counts, and what did not is not waited for."""
        one = rig(size=50_000)
        assert one.put(KEYS) == 40
        server.rate = 1e6
        found = one.read(KEYS, time.monotonic() + 1.2)
        assert 0 < found < 40

    def test_a_deadline_that_passes_between_two_steps(self, server: FakeRedis) -> None:
        ticks = itertools.count()
        ctx = KVStorageContext(IDENTITY, 10, lambda: float(next(ticks)))
        storage = RedisStorage(RedisOptions(url=server.url), ctx)
        assert storage.set(KEYS, [memoryview(content(key, 10)) for key in KEYS], 0.5) == 0
        assert server.asked["SET"] == 0
        storage.close()


def test_blocks_that_are_too_large_are_refused() -> None:
    reason = RedisStorage.supports(RedisOptions(), KVStorageContext(IDENTITY, 64 << 20))
    assert "lower memory.storage_block" in str(reason)
    assert RedisStorage.supports(RedisOptions(), KVStorageContext(IDENTITY, (64 << 20) - 88)) is None


@pytest.mark.full
class TestRedisItself:
    def test_full(self, tmp_path: Path) -> None:
        for policy, fits in (("noeviction", False), ("allkeys-lru", True)):
            folder = tmp_path / policy
            folder.mkdir()
            server = RealRedis(folder, "--save", "", "--maxmemory", "4mb", "--maxmemory-policy", policy)
            one = Rig(server.url, size=200_000)
            assert (one.put(KEYS) == 40) == fits
            assert (one.storage.stats()["dropped"] == 0) == fits
            assert one.read(KEYS[39:] if fits else KEYS[:1]) == 1
            one.storage.close()
            server.end()

    def test_stopped_killed_and_started_again(self, tmp_path: Path) -> None:
        server = RealRedis(tmp_path, "--appendonly", "yes", "--appendfsync", "always")
        one = Rig(server.url, size=20_000, timeout=1.0)
        assert one.put(KEYS) == 40
        server.send(signal.SIGSTOP)
        with pytest.raises(StorageError, match="has not answered"):
            one.read(KEYS)
        server.send(signal.SIGCONT)
        assert one.read(KEYS) == 40
        server.end()
        with pytest.raises(StorageError):
            one.read(KEYS)
        server.start()
        assert one.read(KEYS) == 40, "it saves what it has"
        one.storage.close()
        server.end()
