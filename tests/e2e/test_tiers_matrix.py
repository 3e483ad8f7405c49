"""Same tokens as one by one, however little the device holds: prefixes come back from the host and from files.

The requests and their references are those of test_scheduling_matrix. They are asked several times over, with pools in
which little stays on the device from one round to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pegboard.conformance.covering import covering
from pegboard.core.engine.engine import Engine, GenerateOutput
from tests.e2e.test_scheduling_matrix import TIGHT, Case, World, ask, check, world

if TYPE_CHECKING:
    pass

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
        memory = engine.built.scheduler.components.memory
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
