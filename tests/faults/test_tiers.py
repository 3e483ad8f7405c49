"""Storages that are full, damaged, gone, stopped or slow while requests come: all are answered rightly, and none late.

What is late is in `tests.faults.tiers`: a request may take twice as long as where all is computed, and half a second.
Kills of the whole server are in tiers_kill.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.cache_hiradix.cache import HiRadixCache
from pegboard.plugins.kv_tiers.api import KVStorage, StorageError
from pegboard.plugins.kv_tiers.breaker import REST_SECONDS
from pegboard.plugins.kv_tiers.build import LocalTiers
from pegboard.plugins.storage_files.storage import FilesStorage
from tests.faults.slow_link import SlowLink
from tests.faults.tiers import VOCAB, Scene, World, answered, config, in_time, scene, settle, tiers
from tests.plugins.storage_files.disks import mounted
from tests.plugins.storage_redis.fake_server import FakeRedis
from tests.plugins.storage_redis.real_server import RealRedis

logger = logging.getLogger(__name__)

RUBBISH = "rubbish"
"""A file that fills a disk."""
MOST = 1.1
"""How long a prompt may take where a storage is left alone, over what it takes without one."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with answered(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2), talks=8) as made:
        yield made


def storage_of(one: Scene) -> KVStorage:
    cache = one.engine.built.scheduler.components.memory.cache
    assert isinstance(cache, HiRadixCache)
    assert isinstance(cache.tiers, LocalTiers)
    return cache.tiers.storages[0]


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.01)


def works(one: Scene) -> None:
    """What one turn has left in the storage is found by the next."""
    one.say(0)
    one.flush()
    one.say(1)
    assert one.from_storage > 0, "nothing has come from the storage yet, so this would show nothing"


def is_left_alone(one: Scene, name: str) -> bool:
    return one.tells(f"{name}_breaker_open") == 1


# ---- files -----------------------------------------------------------------------------------------------------------


def blocks_in(folder: Path) -> list[Path]:
    """Return all files; folders may go meanwhile."""
    return [Path(where, name) for where, _, names in os.walk(folder) for name in names if name != RUBBISH]


class Vandal:
    """Damages a file of the folder now and then."""

    KINDS = ("flips", "cuts", "exchanges", "removes", "links")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chance = random.Random(4)
        self.done: set[str] = set()

    def __call__(self) -> None:
        if self.chance.random() < 0.5:
            return
        files = [path for path in blocks_in(self.folder) if not path.is_symlink() and path.name[0] != "."]
        if len(files) < 2:
            return
        one, other = self.chance.sample(files, 2)
        kind = self.chance.choice(self.KINDS)
        try:
            self.damage(kind, one, other)
        except FileNotFoundError:
            return  # the storage was quicker
        self.done.add(kind)

    def damage(self, kind: str, one: Path, other: Path) -> None:
        if kind == "flips":
            data = bytearray(one.read_bytes())
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
            one.write_bytes(data)
        elif kind == "cuts":
            os.truncate(one, self.chance.randrange(one.stat().st_size))
        elif kind == "exchanges":
            shutil.copyfile(one, other)
        else:
            one.unlink()
            if kind == "links":
                one.symlink_to(other)


def test_damaged_and_vanishing_files(world: World, tmp_path: Path) -> None:
    def play(number: int) -> float:
        folder = tmp_path / str(number)
        vandal = Vandal(folder)
        with scene(world, {"use": "files", "dir": str(folder)}) as one:
            works(one)
            for _ in range(2):
                one.flush()
                one.say(1, 2, meanwhile=vandal)
            assert vandal.done == set(Vandal.KINDS)
            assert storage_of(one).stats()["damaged"] > 0
            assert one.tells("files_failures_total") == 0, "damage is a miss, and no failure"
            return one.late

    in_time(play)


@pytest.mark.full
def test_a_folder_that_goes(world: World, tmp_path: Path) -> None:
    """With all that is in it, and comes back when the storage is left alone already."""

    def play(number: int) -> float:
        folder = tmp_path / str(number)
        with scene(world, {"use": "files", "dir": str(folder)}) as one:
            works(one)
            shutil.rmtree(folder)
            one.flush()
            one.say(0, 1)
            settle(one.engine)
            assert is_left_alone(one, "files")
            folder.mkdir()
            one.say(2)
            assert not list(folder.iterdir())
            return one.late

    in_time(play)


@pytest.mark.full
def test_a_full_disk(world: World, tmp_path: Path) -> None:
    """First there is room for some blocks, and the oldest go; then something else takes all, and there is none."""

    def fill(folder: Path, leave: int = 0) -> None:
        about = os.statvfs(folder)
        with contextlib.suppress(OSError), (folder / RUBBISH).open("ab", buffering=0) as file:
            file.write(bytes(max(0, about.f_bavail * about.f_frsize - leave)))

    def take_all(folder: Path) -> None:
        for path in blocks_in(folder):
            path.unlink(missing_ok=True)
        fill(folder)

    def play(number: int) -> float:
        folder = tmp_path / str(number)
        with (
            mounted(folder, "size=4m"),
            scene(world, {"use": "files", "dir": str(folder), "min_free": 0.0, "max_bytes": 1 << 30}) as one,
        ):
            works(one)
            fill(folder, leave=1 << 18)
            one.flush()
            one.say(0, 1, 2)
            settle(one.engine)
            assert storage_of(one).stats()["evicted"] > 0
            one.flush()
            one.say(0, 1, 2, meanwhile=lambda: take_all(folder))
            settle(one.engine)
            assert storage_of(one).stats()["dropped"] > 0
            assert one.tells("store_failed_tokens_total") > 0
            assert not list(folder.rglob(".new-*")), "a temporary file is left"
            return one.late

    in_time(play)


@pytest.mark.full
def test_a_disk_that_becomes_read_only(world: World, tmp_path: Path) -> None:
    def play(number: int) -> float:
        folder = tmp_path / str(number)
        words = ["mount", "-o", "remount,ro", str(folder)]
        with mounted(folder, "size=64m"), scene(world, {"use": "files", "dir": str(folder)}) as one:
            works(one)
            # It does not as long as a file is being written.
            wait_until(lambda: subprocess.run(words, capture_output=True, check=False).returncode == 0)
            before = len(blocks_in(folder))
            one.flush()
            one.say(0, 1, 2)
            settle(one.engine)
            assert one.tells("files_failures_total") > 0
            assert len(blocks_in(folder)) == before
            return one.late

    in_time(play)


# ---- Redis -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def fake() -> Iterator[FakeRedis]:
    server = FakeRedis()
    try:
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def real(folder: Path, *options: str) -> Iterator[RealRedis]:
    folder.mkdir()
    server = RealRedis(folder, *options)
    try:
        yield server
    finally:
        server.end()


MORE = [pytest.param(one, marks=pytest.mark.full, id=name) for name, one in (("OK", b"+OK\r\n"), ("zeros", bytes(64)))]


@pytest.mark.parametrize("rubbish", [pytest.param(b"", id="nothing"), *MORE])
def test_redis_that_answers_nothing_or_rubbish(world: World, rubbish: bytes) -> None:
    def play(_: int) -> float:
        with fake() as server, scene(world, {"use": "redis", "url": server.url}) as one:
            works(one)
            one.flush()
            server.rubbish = rubbish
            if not rubbish:
                server.stop_answering()
            found = one.from_storage
            one.say(1, 2)
            assert one.from_storage == found
            server.going.set()
            settle(one.engine)
            # On a busy machine, calls that were given up before they were made are no failures.
            for _ in range(3):
                if rubbish and not is_left_alone(one, "redis"):
                    one.flush()
                    one.say(1, 2)
                    settle(one.engine)
            assert rubbish == b"" or is_left_alone(one, "redis")
        return one.late

    in_time(play)


def asked_again_is_left_alone(one: Scene) -> bool:
    one.say(2)
    settle(one.engine)
    return is_left_alone(one, "redis")


Harm = Callable[[RealRedis], None]
HARMS: dict[str, Harm] = {"stopped": lambda server: server.send(signal.SIGSTOP), "killed": RealRedis.end}


@pytest.mark.full
@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_redis_itself_goes(world: World, tmp_path: Path, harm: Harm) -> None:
    """In the middle of a conversation. Soon it is left alone, and when it is there again nothing is asked of it yet."""

    def play(number: int) -> float:
        with real(tmp_path / str(number)) as server, scene(world, {"use": "redis", "url": server.url}) as one:
            works(one)
            one.flush()
            steps = iter(range(10**9))
            one.say(0, 1, meanwhile=lambda: harm(server) if next(steps) == 3 else None)
            found = one.from_storage
            one.say(2)
            settle(one.engine)
            # Each call to one that is silent takes a second to fail, and three are needed.
            wait_until(lambda: asked_again_is_left_alone(one))
            server.send(signal.SIGCONT)
            one.flush()
            one.say(0, 1, 2)
            assert one.from_storage == found
        return one.late

    in_time(play)


def fill_up(server: RealRedis) -> None:
    """Let it take hardly more than it has: how much it needs for itself is not known, so no limit can be set before."""
    with redis.Redis.from_url(server.url) as client:
        used = client.info("memory")["used_memory"]
        client.config_set("maxmemory", used + 64 * 2**10)


@pytest.mark.full
def test_redis_itself_is_full(world: World, tmp_path: Path) -> None:
    """It keeps what it has, and that is found; what it does not take is no failure."""

    def play(number: int) -> float:
        small = real(tmp_path / str(number), "--save", "", "--maxmemory-policy", "noeviction")
        with small as server, scene(world, {"use": "redis", "url": server.url}) as one:
            works(one)
            settle(one.engine)
            fill_up(server)
            for _ in range(2):
                one.flush()
                one.say(0, 1, 2)
            settle(one.engine)
            assert storage_of(one).stats()["dropped"] > 0
            assert one.tells("redis_failures_total") == 0
        return one.late

    in_time(play)


@pytest.mark.full
def test_a_store_of_a_megabyte_per_second(world: World, tmp_path: Path) -> None:
    """To load from it takes many times longer than to compute; what is written goes through it, too."""

    def play(number: int) -> float:
        with (
            real(tmp_path / str(number)) as server,
            contextlib.closing(SlowLink(str(server.socket))) as link,
            scene(world, {"use": "redis", "url": link.url}) as one,
        ):
            works(one)
            link.rate = 1e6
            for _ in range(2):
                one.flush()
                one.say(0, 1, 2)
            link.rate = 0.0
        return one.late

    in_time(play)


# ---- left alone ------------------------------------------------------------------------------------------------------


def ratio_to_none(broken: Engine, without: Engine, runs: int = 11) -> float:
    """Return how times to the first token of new prompts compare to those of an engine without storages, in turns."""
    draw, ratios = np.random.default_rng(5), []
    one_token = SamplingParams(temperature=0.0, max_new_tokens=1)
    for number in range(runs + 1):
        took = {}
        for engine in (broken, without) if number % 2 else (without, broken):
            prompt = draw.integers(3, VOCAB, 3000).tolist()
            begun = time.perf_counter()
            engine.generate([prompt], one_token)
            took[engine] = time.perf_counter() - begun
            settle(engine)
        ratios.append(took[broken] / took[without])
    return statistics.median(ratios[1:])


@pytest.mark.full
def test_what_is_left_alone_costs_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked no more, but for a probe each half minute; prompts are computed as soon as without a storage."""
    calls: list[float] = []

    def broken(*_: object) -> int:
        calls.append(time.monotonic())
        raise StorageError("broken")

    for name in ("exists", "get", "set"):
        monkeypatch.setattr(FilesStorage, name, broken)
    with (
        Engine.from_config(config(world.model, **tiers(None))) as without,
        scene(world, {"use": "files", "dir": str(tmp_path)}) as one,
    ):
        one.say(0)
        settle(one.engine)
        assert is_left_alone(one, "files")
        asked, last = len(calls), calls[-1]
        ratios = [ratio_to_none(one.engine, without)]
        while ratios[-1] > MOST and len(ratios) < 5:
            ratios.append(ratio_to_none(one.engine, without))
        one.say(0, 1, 2)
        assert len(calls) - asked <= (time.monotonic() - last) / REST_SECONDS
        logger.info("against an engine without storage: %s", ratios)
        assert min(ratios) <= MOST, f"it takes {ratios} times as long"
