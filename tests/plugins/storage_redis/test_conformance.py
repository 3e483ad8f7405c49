"""The storage behind Redis' protocol keeps the contract: over a fake in `make test`, over Redis itself where it is."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from pegboard.plugins.kv_tiers.api import KVStorage
from pegboard.plugins.kv_tiers.suite.kv_storage import KVStorageContract
from pegboard.plugins.storage_redis.options import RedisOptions
from tests.plugins.storage_redis.fake_server import FakeRedis
from tests.plugins.storage_redis.real_server import RealRedis


class OverRedis(KVStorageContract):
    """How the suite finds a server, and what stands for a block there."""

    contract = "kv_storage"
    url = ""

    def place(self, folder: Path) -> dict[str, str]:
        return {"url": self.url, "prefix": secrets.token_hex(4)}

    def name(self, storage: KVStorage, key: bytes) -> bytes:
        assert isinstance(storage.options, RedisOptions)
        return f"{storage.options.prefix}:{storage.ctx.identity}:".encode() + key


class TestOverAFake(OverRedis, KVStorageContract):
    provider = "redis"
    server: FakeRedis

    @pytest.fixture(autouse=True)
    def _server(self) -> Iterator[None]:
        self.server = FakeRedis()
        self.url = self.server.url
        yield
        self.server.end()
        assert self.server.strange == []

    def raw(self, storage: KVStorage, key: bytes) -> bytes | None:
        return self.server.values.get(self.name(storage, key))

    def put_raw(self, storage: KVStorage, key: bytes, data: bytes | None) -> None:
        if data is None:
            del self.server.values[self.name(storage, key)]
        else:
            self.server.values[self.name(storage, key)] = data


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRedis]:
    server = RealRedis(tmp_path_factory.mktemp("redis"))
    yield server
    server.end()


@pytest.mark.full
class TestOverRedis(OverRedis, KVStorageContract):
    provider = "redis"

    @pytest.fixture(autouse=True)
    def _server(self, real: RealRedis) -> Iterator[None]:
        self.url = real.url
        with redis.Redis(unix_socket_path=str(real.socket), protocol=2) as self.client:
            yield

    def raw(self, storage: KVStorage, key: bytes) -> bytes | None:
        value = self.client.get(self.name(storage, key))
        assert value is None or isinstance(value, bytes)
        return value

    def put_raw(self, storage: KVStorage, key: bytes, data: bytes | None) -> None:
        if data is None:
            self.client.delete(self.name(storage, key))
        else:
            self.client.set(self.name(storage, key), data)
