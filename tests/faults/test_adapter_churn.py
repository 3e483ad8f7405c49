"""Adapters that come and go under load: every answer is that of the adapter that its name meant when it was asked."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from pegboard import Engine
from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.adapters.stage import Adapters
from tests.faults.forcing import Forced
from tests.plugins.adapters.peft_files import write_adapter

NAMES = ("a", "b", "c", "d", "e")
LENGTH = 6
STEPS = 1500
PROMPT = [40, 41, 42, 43, 44, 45, 60]


class Churn:
    """Random requests, loads, unloads and aborts. `expected` are the answers of each directory alone."""

    def __init__(self, engine: Engine, directories: list[str], seed: int) -> None:
        self.engine = engine
        [self.stage] = [one for one in engine.built.scheduler.components.points.stages if isinstance(one, Adapters)]
        self.directories = directories
        self.draw = random.Random(seed)
        self.asked: dict[str, set[str]] = {}
        """The directories that the name of a request may mean: a load may end while it arrives."""
        self.arriving: dict[str, str] = {}
        self.found: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}
        self.counts = Counter[str]()

    def request(self, name: str) -> str:
        sampling = SamplingParams(max_new_tokens=LENGTH, temperature=0.0, ignore_eos=True)
        params = {"adapter": name} if name else {}
        return self.engine.submit(GenerateRequest(prompt=PROMPT, sampling=sampling, params=params, stream=True))

    def learn(self) -> None:
        """Note what each directory answers by itself."""
        for path in ("", *self.directories):
            if path:
                self.stage.store.load("x", path)
            rid = self.request("x" if path else "")
            self.asked[rid], self.found[rid] = set(), []
            while rid in self.asked:
                self.poll(check=False)
            self.expected[path] = self.found.pop(rid)
            if path:
                self.stage.store.unload("x")
        assert len({tuple(tokens) for tokens in self.expected.values()}) == len(self.expected)

    def poll(self, *, check: bool = True) -> None:
        chunks = self.engine.poll()
        for rid, name in self.arriving.items():
            if rid in self.asked and name in self.stage.store.names:
                self.asked[rid].add(self.stage.store.names[name].path)
        self.arriving.clear()
        for chunk in chunks:
            self.found[chunk.rid] += chunk.token_ids
            if chunk.finish_reason is None:
                continue
            paths = self.asked.pop(chunk.rid)
            assert chunk.finish_reason["type"] == "length", chunk.finish_reason
            if check:
                assert self.found.pop(chunk.rid) in [self.expected[path] for path in paths], paths
                self.counts["answers"] += 1

    def enough(self) -> bool:
        """Return whether enough was computed, and changed meanwhile. How many steps that takes depends on how fast the
        thread that loads is.
        """
        counts = self.counts
        return counts["answers"] > STEPS / 10 and all(
            counts[one] > 20 for one in ("load", "unload", "replace", "abort")
        )

    def act(self) -> None:
        store, name = self.stage.store, self.draw.choice(NAMES)
        action = self.draw.choices(["ask", "base", "load", "unload", "replace", "abort"], [12, 2, 2, 1, 1, 2])[0]
        if len(self.asked) > 12:
            return
        try:
            if action in ("ask", "base"):
                rid = self.request(name if action == "ask" else "")
                self.asked[rid] = {store.names[name].path if action == "ask" else ""}
                if action == "ask":
                    self.arriving[rid] = name
                self.found[rid] = []
            elif action == "load":
                store.load(name, self.draw.choice(self.directories))
            elif action == "unload":
                store.unload(name)
            elif action == "replace":
                store.load(name, self.draw.choice(self.directories), replace=True)
            elif self.asked:
                rid = self.draw.choice(list(self.asked))
                self.engine.abort(rid)
                del self.asked[rid], self.found[rid]
            self.counts[action] += 1
        except InvalidRequest as error:
            if error.status not in (404, 409):
                raise
            self.counts[f"refused {action}"] += 1


def unload_all(engine: Engine, stage: Adapters) -> None:
    """Unload what no request uses any more: nothing is left, and the books balance."""
    for name in list(stage.store.names):
        stage.store.unload(name)
    stage.store.refresh()
    assert not list(stage.store.loaded)
    assert stage.slots.in_use == stage.slots.waiting == 0
    assert engine.stats()["book_errors"] == 0


@pytest.mark.parametrize(("seed", "loop"), [(1, "normal"), (2, "overlap")])
def test_no_wrong_token(tmp_path: Path, seed: int, loop: str) -> None:
    model = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    directories = [str(write_adapter(tmp_path / "adapters" / str(one), model, seed=one)) for one in range(6)]
    config = {
        "model": {"path": str(model), "dtype": "float32"},
        "memory": {"max_total_tokens": 128},
        "attention": {"use": "torch"},
        "runner": {"use": "layered"},
        "scheduler": {"loop": loop, "new_token_ratio": 0.05, "retract_lookahead": 0},
        "adapters": {"directories": [str(tmp_path / "adapters")], "slots": 2, "fair_after": 0.05},
    }
    with Engine.from_config(config) as engine:
        churn = Churn(engine, directories, seed)
        churn.learn()
        for step in range(20 * STEPS):
            churn.act()
            churn.poll()
            if step > STEPS and churn.enough():
                break
        while churn.asked:
            churn.poll()
        while churn.stage.store.loading:
            churn.stage.store.refresh()
        unload_all(engine, churn.stage)
        # What was computed and what was refused, so that this shows something.
        assert churn.enough(), churn.counts


ROUNDS = 200
TWELVE = tuple(f"name{number}" for number in range(12))
AT_ONCE = 4
"""Requests of the same prompt and adapter, as `n` makes them."""


def resident() -> int:
    """Return the bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Asked:
    """A request, with the tokens that it may get: a name may get another adapter while it arrives."""

    name: str
    tokens: set[int]
    arriving: bool = True


class ForcedChurn:
    """Loads and unloads of twelve names under load, each adapter with a token of its own."""

    def __init__(self, engine: Engine, tokens: dict[str, int], seed: int) -> None:
        self.engine = engine
        [self.stage] = [one for one in engine.built.scheduler.components.points.stages if isinstance(one, Adapters)]
        self.tokens = tokens
        self.draw = random.Random(seed)
        self.asked: dict[str, Asked] = {}
        self.counts = Counter[str]()

    def ask(self) -> None:
        name = self.draw.choice(TWELVE)
        if len(self.asked) > 24 or name not in self.stage.store.names:
            return
        prompt = [self.draw.randrange(40, 100) for _ in range(self.draw.choice((3, 9, 30)))]
        sampling = SamplingParams(max_new_tokens=self.draw.choice((1, 4, 9)), temperature=0.0, ignore_eos=True)
        meant = self.tokens[self.stage.store.names[name].path]
        for _ in range(AT_ONCE):
            asked = GenerateRequest(prompt=prompt, sampling=sampling, params={"adapter": name}, stream=True)
            self.asked[self.engine.submit(asked)] = Asked(name, {meant})

    def abort(self) -> None:
        if self.asked:
            rid = self.draw.choice(list(self.asked))
            self.engine.abort(rid)
            del self.asked[rid]
            self.counts["aborted"] += 1

    def change(self, number: int) -> None:
        """Load a name, or another adapter under one that is loaded; unload one, or end what it has."""
        store, name = self.stage.store, TWELVE[number % len(TWELVE)]
        path = self.draw.choice(list(self.tokens))
        if name not in store.names:
            store.load(name, path)
        elif number % 3 == 0:
            store.load(name, path, replace=True)
        else:
            self.stage.unload(name, force=number % 5 == 0)
            self.counts["unloaded"] += 1
        self.counts["changed"] += 1

    def poll(self) -> None:
        chunks = self.engine.poll()
        for asked in self.asked.values():
            if asked.arriving and asked.name in self.stage.store.names:
                asked.tokens.add(self.tokens[self.stage.store.names[asked.name].path])
            asked.arriving = False
        for chunk in chunks:
            if (found := self.asked.get(chunk.rid)) is None:
                continue
            assert set(chunk.token_ids) <= found.tokens, f"{chunk.token_ids} and not {found.tokens}"
            self.counts["tokens"] += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                del self.asked[chunk.rid]
                status = chunk.finish_reason.get("status")
                assert chunk.finish_reason["type"] == "length" or status in (404, 503), chunk.finish_reason
                self.counts["ended" if status is None else f"ended with {status}"] += 1

    def settle(self) -> None:
        while self.asked or self.stage.store.loading:
            self.poll()
            self.stage.store.refresh()


@pytest.mark.full
@pytest.mark.parametrize(("runner", "loop"), [("cpu_native", "overlap"), ("layered", "normal")])
def test_two_hundred_loads_and_unloads(tmp_path: Path, runner: str, loop: str) -> None:
    """Not one wrong token, and at the end nothing is in use. Memory is what it was after the first twenty."""
    model = Forced(tmp_path)
    tokens: dict[str, int] = {}
    for number in range(16):
        path, token = model.adapter(tmp_path / "adapters" / str(number), set(tokens.values()))
        tokens[str(path)] = token
    # In 16 bits torch compiles a product for each number of rows, and keeps up to a thousand of them.
    # The native runner keeps 16 ranks of the first matrix, of which 15 are zeros.
    dtype, size = ("bfloat16", 2112) if runner == "cpu_native" else ("float32", 384)
    config = {
        "model": {"path": str(model.path), "dtype": dtype},
        # So few that requests are retracted however long loads take, for which some wait.
        "memory": {"max_total_tokens": 160},
        "runner": {"use": runner},
        "scheduler": {"loop": loop, "new_token_ratio": 0.05, "retract_lookahead": 0},
        "adapters": {
            "directories": [str(tmp_path / "adapters")], "slots": 3, "fair_after": 0.05, "host_bytes": 8 * size,
        },
    }  # fmt: skip
    early = 0
    with Engine.from_config(config) as engine:
        churn = ForcedChurn(engine, tokens, seed=len(runner))
        for number in range(ROUNDS + 20):
            churn.change(number)
            for _ in range(12):
                churn.ask()
                churn.poll()
            if number % 4 == 0:
                churn.abort()
            if number == 20:
                churn.settle()
                gc.collect()
                early = resident()
        churn.settle()
        unload_all(engine, churn.stage)
        gc.collect()
        assert resident() <= 1.03 * early
        stats = engine.stats()
        assert min(churn.counts[one] for one in ("tokens", "ended", "unloaded", "aborted")) > 40, churn.counts
        assert stats["adapter_evictions_total"] > 20
        assert stats["retractions"] > 0
