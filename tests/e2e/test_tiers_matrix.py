"""Same tokens as one by one, however little the device holds: prefixes come back from the host and from files.

The requests and their references are those of test_scheduling_matrix. They are asked several times over, with pools in
which little stays on the device from one round to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pegboard.conformance.covering import covering
from pegboard.core.engine import tiers as engine_tiers
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.host_pool import HostPoolContext
from pegboard.core.interfaces.kv_storage import KVStorageContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.pipeline.tiers.fan import FanMover
from pegboard.core.pipeline.tiers.loading import HostLoads
from pegboard.core.pipeline.tiers.mover import LocalMover
from pegboard.plugins.memory_host.pool import LayerFirst
from pegboard.plugins.storage_files.storage import FilesStorage
from tests.e2e.test_scheduling_matrix import TIGHT, Case, World, ask, check, world

if TYPE_CHECKING:
    import torch

    from pegboard.core.interfaces.kv_pool import KVPool

__all__ = ["world"]

ROUNDS = 3
TOGETHER = 5
"""Requests at a time: what they leave on the device is gone when they come back."""


class Setting(NamedTuple):
    """One arrangement of the tiers, and of the scheduler above them."""

    policy: str
    loop: str
    page_size: int
    chunk: int
    layout: str
    files: bool

    def config(self, world: World, directory: Path) -> dict[str, Any]:
        storage = [{"use": "files", "dir": str(directory)}] if self.files else []
        gates = [{"use": "prefetch", "policy": "wait_complete", "threshold": 16}] if self.files else []
        return world.config(
            prefix_cache={"use": "hiradix", "write_policy": self.policy, "prefetch_threshold": 16},
            gates=gates,
            memory={
                "page_size": self.page_size,
                "max_total_tokens": TIGHT,
                "host": {"use": self.layout, "max_total_tokens": (3 if self.forgets else 16) * TIGHT},
                "storage": storage,
                "storage_block": 16,
            },
            scheduler={"loop": self.loop, "chunked_prefill_size": self.chunk, "max_running_requests": 4},
        )

    @property
    def forgets(self) -> bool:
        """Whether the host is so small that what it had is left in files alone."""
        return self.files and self.policy == "write_through"

    def __str__(self) -> str:
        files = "files" if self.files else "host"
        return f"{self.policy}-{self.loop}-page_{self.page_size}-chunk_{self.chunk}-{self.layout}-{files}"


VALUES: tuple[Sequence[Any], ...] = (
    ("write_through", "write_through_selective", "write_back"),
    ("normal", "overlap"),
    (1, 16),
    (32, 0),
    ("layer_first", "page_first"),
    (False, True),
)
ALL = list(itertools.starmap(Setting, itertools.product(*VALUES)))
FEW = [
    Setting("write_through", "overlap", 1, 32, "layer_first", False),
    Setting("write_back", "normal", 16, 0, "page_first", True),
]
REST = [one for one in covering(ALL, 3) if one not in FEW]


def settle(engine: Engine) -> None:
    """Let what is on its way to the host and to files arrive."""
    scheduler = engine.built.scheduler
    while scheduler.busy:
        scheduler.step()


def run(setting: Setting, world: World, directory: Path) -> None:
    with Engine.from_config(setting.config(world, directory)) as engine:
        asked: list[Case] = []
        outputs: list[GenerateOutput] = []
        selective = setting.policy == "write_through_selective"
        first: dict[str, Any] = {}
        for number, start in itertools.product(range(ROUNDS), range(0, len(world.cases), TOGETHER)):
            some = world.cases[start : start + TOGETHER]
            if number == 1 and not first:
                first = engine.stats()
            # What is to be kept from its second use on is used twice while it is there.
            for _ in range(2 if number == 0 and selective else 1):
                outputs += ask(engine, some)
                asked += some
            settle(engine)
        check(asked, outputs)
        stats = engine.stats()
        memory = engine.built.scheduler.stages.memory
        assert memory.idle_error() is None
        memory.cache.check()
    assert stats["book_errors"] == stats["failed_batches"] == stats["aborted"] == stats["plugin_failures"] == 0
    hits, host, storage = (
        stats[name] - first[name] for name in ("cached_tokens", "cached_host_tokens", "cached_storage_tokens")
    )
    assert host + storage >= hits / 2 > 0
    assert (storage > 0) == setting.forgets


@pytest.mark.parametrize("setting", FEW, ids=str)
def test_some_settings(setting: Setting, world: World, tmp_path: Path) -> None:
    run(setting, world, tmp_path)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", REST, ids=str)
def test_every_triple_of_settings(setting: Setting, world: World, tmp_path: Path) -> None:
    run(setting, world, tmp_path)


class RankedHost(LayerFirst):
    """The host pool of two ranks, each of which has every other layer, as what loads pages sees it."""

    def __init__(self, ctx: HostPoolContext) -> None:
        super().__init__(NoOptions(), replace(ctx, num_pages=1))
        self.ranks = [LayerFirst(NoOptions(), replace(ctx, layers=ctx.layers[rank::2])) for rank in range(2)]

    def load(self, pool: KVPool, layer_id: int, host: torch.Tensor, device: torch.Tensor) -> None:
        owner = next(one for one in self.ranks if layer_id in one.parts)
        owner.load(pool, layer_id, host, device)


class Forgetful(FilesStorage):
    """Keeps three of four blocks."""

    def set(self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: float) -> int:
        for key, block in zip(keys, blocks, strict=True):
            if key[0] % 4:
                super().set([key], [block], deadline)
        return len(keys)


@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=pytest.mark.full)])
def test_two_ranks_of_which_one_has_less(
    page_size: int, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has other layers of all pages, in memory and in files; the second one has forgotten some files."""
    host: list[RankedHost] = []

    def fan(pool: KVPool, whole: LayerFirst, storages: Sequence[tuple[str, FilesStorage]]) -> FanMover:
        ctx = HostPoolContext(
            whole.num_pages, whole.page_size, whole.layers, whole.dtype, whole.device, whole.block_pages
        )
        host.append(RankedHost(ctx))
        ((name, files),) = storages
        movers = []
        for rank, (part, cls) in enumerate(zip(host[0].ranks, (FilesStorage, Forgetful), strict=True)):
            mine = cls(files.options, KVStorageContext("ab" * 16, part.block_bytes))
            movers.append(LocalMover(pool, part, [(name, mine)], suffix=b".%d" % rank))
        return FanMover(movers)

    monkeypatch.setattr(engine_tiers, "LocalMover", fan)
    monkeypatch.setattr(engine_tiers, "HostLoads", lambda _, pool, device: HostLoads(host[0], pool, device))
    run(Setting("write_through", "overlap", page_size, 32, "layer_first", True), world, tmp_path)
    kept = [len(list(tmp_path.rglob("*" + (b".%d" % rank).hex()))) for rank in range(2)]
    assert kept[0] > kept[1] > 0
