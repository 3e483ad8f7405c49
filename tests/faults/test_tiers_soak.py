"""Many turns of conversations over KV in tiers, of which a third are aborted: none is wrong, and nothing is left."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.client import GenerateRequest
from tests.faults.tiers import GREEDY, POOL, Turn, World, answered, config, settle, tiers

logger = logging.getLogger(__name__)

TOGETHER = 6
"""Requests under way at once, at most."""
BETWEEN_IDLES = 20
SAME_SALT = 60
"""Requests that may share prefixes; then all is new."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with answered(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2), talks=8) as made:
        yield made


@dataclass
class Asked:
    turn: Turn
    output: GenerateOutput
    leaves: int | None
    """After how many steps it is aborted."""


class Soak:
    """Requests over one engine. `happened` counts what became of them, and where those were that were aborted."""

    def __init__(self, world: World, engine: Engine, seed: int) -> None:
        self.turns = [turn for talk in world.talks for turn in talk]
        self.engine = engine
        self.chance = random.Random(seed)
        self.under_way: dict[str, Asked] = {}
        self.happened = Counter[str]()
        self.sent = 0

    def run(self, requests: int) -> None:
        while self.sent < requests:
            until = min(requests, self.sent + BETWEEN_IDLES)
            while self.sent < until or self.under_way:
                if self.sent < until and len(self.under_way) < self.chance.randint(1, TOGETHER):
                    self.send()
                self.leave()
                self.poll()
            self.idle()

    def send(self) -> None:
        turn = self.chance.choice(self.turns)
        salt = str(self.sent // SAME_SALT)
        rid = self.engine.submit(GenerateRequest(prompt=turn.prompt, sampling=GREEDY, stream=True, cache_salt=salt))
        leaves = self.chance.choice((0, 1, 2, 3, 5, 9)) if self.chance.random() < 0.35 else None
        self.under_way[rid] = Asked(turn, GenerateOutput(rid), leaves)
        self.sent += 1

    def leave(self) -> None:
        for rid, asked in list(self.under_way.items()):
            if asked.leaves == 0:
                blocked = {one["rid"] for one in self.engine.stats()["gates"]}
                place = "running" if asked.output.token_ids else "blocked" if rid in blocked else "other"
                self.happened[f"aborted {place}"] += 1
                del self.under_way[rid]
                self.engine.abort(rid)
            elif asked.leaves is not None:
                asked.leaves -= 1

    def poll(self) -> None:
        for chunk in self.engine.poll():
            asked = self.under_way[chunk.rid]
            asked.output.add(chunk)
            assert asked.output.token_ids == asked.turn.answer[: len(asked.output.token_ids)], "a wrong token"
            if chunk.finish_reason is not None:
                assert chunk.finish_reason["type"] == "length", chunk.finish_reason
                self.happened["answered"] += 1
                self.happened["from storage"] += asked.output.cached_storage > 0
                self.happened["from the host"] += asked.output.cached_host > 0
                del self.under_way[chunk.rid]

    def idle(self) -> None:
        """Look at the books; at times with nothing kept. What is pinned then is out of use, and shows."""
        settle(self.engine)
        if self.chance.random() < 0.4:
            self.engine.flush_cache()
            self.happened["flushes"] += 1
            now = self.engine.stats()
            assert now["free_tokens"] == now["total_tokens"]
            assert now["tiers"]["host_free_tokens"] == POOL, "host pages are still pinned"
        now = self.engine.stats()
        assert now["locked_tokens"] == now["held_tokens"] == now["blocked_requests"] == 0
        assert now["tiers"]["quarantined_tokens"] == 0


@pytest.mark.parametrize(
    ("requests", "wait", "write"),
    [
        pytest.param(60, "timeout", "write_through", marks=pytest.mark.full),
        pytest.param(60, "best_effort", "write_back", marks=pytest.mark.full),
        pytest.param(1000, "timeout", "write_through", marks=pytest.mark.soak),
        pytest.param(1000, "wait_complete", "write_through_selective", marks=pytest.mark.soak),
        pytest.param(1000, "best_effort", "write_back", marks=pytest.mark.soak),
    ],
)
def test_turns_and_aborts(world: World, tmp_path: Path, requests: int, wait: str, write: str) -> None:
    storage = {"use": "files", "dir": str(tmp_path), "max_bytes": 4 << 20}
    with Engine.from_config(config(world.model, **tiers(storage, wait=wait, write=write))) as engine:
        soak = Soak(world, engine, seed=7)
        soak.run(requests)
    logger.info("%d requests: %s", requests, dict(soak.happened))
    aborted = sum(soak.happened[f"aborted {place}"] for place in ("blocked", "running", "other"))
    assert aborted + soak.happened["answered"] == requests
    assert soak.happened["answered"] > requests / 2
    assert soak.happened["from the host"] + soak.happened["from storage"] > 0
    if requests >= 1000:
        assert soak.happened["from the host"] > 10
        assert soak.happened["from storage"] > 0
        assert soak.happened["aborted running"] > 20
        assert soak.happened["aborted other"] > 20
        assert wait == "best_effort" or soak.happened["aborted blocked"] > 20
