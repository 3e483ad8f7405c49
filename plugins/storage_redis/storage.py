"""RedisStorage: a value per block."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import redis
from redis.backoff import NoBackoff
from redis.connection import ConnectionPool
from redis.retry import Retry

from pegboard.plugins.kv_tiers.api import KVStorage, KVStorageContext, StorageError
from pegboard.plugins.storage_redis.options import RedisOptions
from pegboard.plugins.storage_redis.pace import MOST_KEYS, Pace
from pegboard.toolkit.cache.block_frames import BlockFrames

logger = logging.getLogger(__name__)

MOST_VALUE_BYTES = 64 << 20
"""Of one value. A server takes 512 MB, but works on nothing else meanwhile."""

Command = tuple[bytes | str | int, ...]


class _Pipeline(Protocol):
    """What is used of redis' pipeline, which has no types for it."""

    def execute_command(self, *words: bytes | str | int) -> object: ...

    def execute(self, raise_on_error: bool = True) -> list[object]: ...


class RedisStorage(KVStorage[RedisOptions]):
    """Blocks as values at `<prefix>:<identity>:<key>`, each with the header of BlockFrames before it.

    They outlive this server; how long they live in Redis is Redis' affair: they expire after `ttl`, are evicted by its
    `maxmemory-policy`, and outlive its own restarts where it saves them. All commands of one step go as one pipeline,
    and a step is short, so that the deadline is looked at often.
    """

    def __init__(self, options: RedisOptions, ctx: KVStorageContext) -> None:
        super().__init__(options, ctx)
        self._frames = BlockFrames(ctx.identity, ctx.block_bytes)
        self._prefix = f"{options.prefix}:{ctx.identity}:".encode()
        self._pool = _pool(options)
        self._client = redis.Redis(connection_pool=self._pool)
        self._client.response_callbacks.clear()  # which make True of whatever comes
        self._reading, self._writing = Pace(self._frames.frame_bytes), Pace(self._frames.frame_bytes)
        self._damaged = self._dropped = 0
        try:
            self._client.ping()
        except (redis.RedisError, OSError) as error:  # it may come back, and the engine works without it
            logger.warning("%s does not answer, so no KV is kept there for now: %s", options.url, error)

    @classmethod
    def supports(cls, options: RedisOptions, ctx: KVStorageContext) -> str | None:
        most = MOST_VALUE_BYTES - BlockFrames.header_bytes
        if ctx.block_bytes > most:
            return f"a block has {ctx.block_bytes} bytes, and a value at most {most}; lower memory.storage_block"
        return None

    def exists(self, keys: Sequence[bytes], deadline: float) -> int:
        for start in range(0, len(keys), MOST_KEYS):
            commands: list[Command] = [("EXISTS", self._name(key)) for key in keys[start : start + MOST_KEYS]]
            answers = self._ask(commands, deadline)
            found = sum(1 for _ in itertools.takewhile(bool, map(self._yes, answers)))
            if found < len(commands):
                return start + found
        return len(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: float) -> int:
        done = 0
        while done < len(keys):
            some = keys[done : done + self._reading.blocks]
            began = time.monotonic()
            values = self._values(some, deadline)
            self._reading.note(len(values) - values.count(None), time.monotonic() - began)
            for key, out, value in zip(some, into[done:], values, strict=False):
                if value is None or not self._take(key, value, out):
                    return done
                done += 1
            if len(values) < len(some):
                return done
        return done

    def set(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> int:
        done = 0
        while done < len(keys):
            count = self._writing.blocks
            written = self._write(keys[done : done + count], blocks[done : done + count], deadline)
            done += written
            if written < count:
                return done
        return done

    def delete(self, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), MOST_KEYS):
            self._remove([self._name(key) for key in keys[start : start + MOST_KEYS]])

    def clear(self) -> None:
        cursor = 0
        while True:
            [answer] = self._ask([("SCAN", cursor, "MATCH", self._prefix + b"*", "COUNT", MOST_KEYS)])
            page = self._checked(answer)
            if not isinstance(page, list | tuple) or len(page) != 2:
                raise StorageError(f"{self.options.url} answers SCAN with something else")
            cursor, names = int(page[0]), list(page[1])
            if names:
                self._remove(names)
            if cursor == 0:
                return

    def stats(self) -> Mapping[str, float]:
        return {"damaged": self._damaged, "dropped": self._dropped}

    def close(self) -> None:
        self._client.close()
        self._pool.disconnect()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key

    def _ask(self, commands: Sequence[Command], deadline: float | None = None) -> list[object]:
        """Send commands at once; return what each is answered with, which may be an error. [] where the deadline has
        passed before. Raises StorageError.
        """
        if self._late(deadline):
            return []
        pipeline: _Pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            answers = pipeline.execute(raise_on_error=False)
        except redis.TimeoutError as error:
            if self._late(deadline):
                return []
            raise StorageError(f"{self.options.url} has not answered for {self.options.timeout} s") from error
        except Exception as error:
            # What else comes over this connection may belong to something else; those in use are of other threads.
            self._pool.disconnect(inuse_connections=False)
            raise StorageError(f"{self.options.url}: {error}") from error
        return answers

    def _late(self, deadline: float | None) -> bool:
        return deadline is not None and self.ctx.clock() >= deadline

    def _checked(self, answer: object) -> object:
        if isinstance(answer, Exception):
            raise StorageError(f"{self.options.url}: {answer}") from answer
        return answer

    def _yes(self, answer: object) -> bool:
        return self._checked(answer) in (1, b"OK")

    def _values(self, keys: Sequence[bytes], deadline: float) -> list[bytes | None]:
        """Return the values of all keys, or [] where it is too late."""
        answers = self._ask([("MGET", *map(self._name, keys))], deadline)
        if not answers:
            return []
        values = self._checked(answers[0])
        if not isinstance(values, list) or len(values) != len(keys):
            raise StorageError(f"{self.options.url} answers MGET with something else")
        return values

    def _take(self, key: bytes, value: bytes, out: memoryview) -> bool:
        """Copy a block out of a value; remove one that is not as it was written."""
        header, block = memoryview(value)[: self._frames.header_bytes], memoryview(value)[self._frames.header_bytes :]
        if len(block) == self.ctx.block_bytes and self._frames.fits(header, key, block):
            out.cast("B")[:] = block
            return True
        self._damaged += 1
        level = logging.WARNING if self._damaged == 1 else logging.DEBUG
        logger.log(level, "a damaged block is removed: %s at %s", key.hex(), self.options.url)
        self._remove([self._name(key)])
        return False

    def _write(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> int:
        """Write blocks that are not there, and renew the time of the others. Return how many there are now."""
        names, ttl = [self._name(key) for key in keys], self.options.ttl
        looks: list[Command] = [("EXPIRE", name, ttl) if ttl else ("EXISTS", name) for name in names]
        there = [self._yes(answer) for answer in self._ask(looks, deadline)]
        missing = [number for number, known in enumerate(there) if not known]
        end: Command = ("EX", ttl) if ttl else ()
        commands: list[Command] = [
            ("SET", names[n], b"".join((self._frames.header(keys[n], blocks[n]), blocks[n])), *end) for n in missing
        ]
        began = time.monotonic()
        answers = self._ask(commands, deadline) if commands else []
        self._writing.note(len(answers), time.monotonic() - began)
        for number, answer in zip(missing, answers, strict=False):
            if isinstance(answer, redis.exceptions.OutOfMemoryError):
                self._full(answer)
                break
            there[number] = self._yes(answer)
        return sum(1 for _ in itertools.takewhile(bool, there))

    def _full(self, error: Exception) -> None:
        self._dropped += 1
        level = logging.WARNING if self._dropped == 1 else logging.DEBUG
        hint = "with maxmemory-policy allkeys-lru it would make room"
        logger.log(level, "%s has no memory for more blocks (%s); %s", self.options.url, error, hint)

    def _remove(self, names: Sequence[bytes]) -> None:
        for answer in self._ask([("UNLINK", *names)]):
            self._checked(answer)


def _pool(options: RedisOptions) -> ConnectionPool:
    """Return connections that are opened when they are needed. One that was lost is opened again, once."""
    tls = {
        "ssl_ca_certs": options.tls_ca_file or None,
        "ssl_certfile": options.tls_cert_file or None,
        "ssl_keyfile": options.tls_key_file or None,
        "ssl_check_hostname": True,
    }
    return ConnectionPool.from_url(
        options.url,
        username=options.username or None,
        password=options.password or None,
        socket_timeout=options.timeout,
        socket_connect_timeout=options.timeout,
        socket_read_size=1 << 18,
        protocol=2,
        retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
        **(tls if options.url.startswith("rediss://") else {}),
    )
