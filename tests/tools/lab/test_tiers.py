"""Tiers in the lab: what is found where is what a plain model says, and it takes as long as speeds say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pegboard.core.cli.main import app
from pegboard.core.interfaces.errors import ConfigError
from pegboard.tools.lab.assemble import resolve
from pegboard.tools.lab.cost import CostModel, StorageCost, TierCost
from pegboard.tools.lab.report import TIERS, summarise
from pegboard.tools.lab.run import Outcome, Record, Simulation
from pegboard.tools.lab.workloads import WorkloadChoice

COST = CostModel(
    base=0.01,
    per_token=0.0001,
    kv_token_bytes=1_000_000,
    host=TierCost(read=10.0, write=10.0),
    storages={"files": StorageCost(read=5.0, write=5.0, latency=0.001)},
)
PROMPT = 257
"""Sixteen pages, four blocks of 64 tokens, and one token that is always computed."""
PAGES = 16
HIRADIX = ("prefix_cache.use=hiradix", "memory.page_size=16", "scheduler.policy.use=fcfs")
FILES = (
    *("memory.storage=[files]", "prefix_cache.prefetch_threshold=16"),
    *("prefix_cache.store_share=1.0", "prefix_cache.prefetch_share=1.0"),
    "gates=[{use: prefetch, policy: wait_complete, threshold: 16}]",
)


def simulate(workload: str, *overrides: str, cost: CostModel = COST, requests: int = 1000) -> tuple[Outcome, Any]:
    built = WorkloadChoice.parse(workload).build(requests, 5.0, 0)
    outcome = Simulation("run", resolve((), overrides), built, cost).run()
    figures = summarise(outcome)
    assert figures["book_errors"] == figures["rejected"] == 0
    return outcome, figures


def trace(path: Path, prompts: Sequence[int], every: float = 10.0) -> str:
    """Return a workload of these prompts, one by one; equal numbers, equal prompts."""
    lines = [
        {"timestamp": at * every, "input_length": PROMPT, "output_length": 1, "hash_ids": [number]}
        for at, number in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return f"{path}:block={PROMPT}"


def device(prompts: int) -> str:
    """Return the setting of a pool for so many prompts, and the last token of one."""
    return f"memory.max_total_tokens={(prompts * PAGES + 1) * 16}"


def host(prompts: int) -> str:
    return f"memory.host.max_total_tokens={prompts * PAGES * 16}"


def found(record: Record) -> str:
    """Return where the prompt of a request was: it is in one piece."""
    here = record.cached - record.cached_host - record.cached_storage
    tokens = {"device": here, "host": record.cached_host, "storage": record.cached_storage}
    assert sorted(tokens.values())[:2] == [0, 0]
    assert record.cached in (0, PAGES * 16)
    return next((tier for tier, count in tokens.items() if count), "computed")


class PlainTiers:
    """Whole prompts, least recently used first, in tiers for so many of them; all is written through. What the host
    gives up first is what the device has as well.
    """

    def __init__(self, device: int, host: int, storage: int) -> None:
        self.rooms = {"device": device, "host": host, "storage": storage}
        self.tiers: dict[str, list[int]] = {tier: [] for tier in self.rooms}

    def ask(self, prompt: int) -> str:
        where = next((tier for tier, prompts in self.tiers.items() if prompt in prompts), "computed")
        if where == "storage":
            self._copy(prompt)
        self._use("device", prompt)
        if prompt not in self.tiers["host"]:
            self._copy(prompt)
        self._use("host", prompt)
        return where

    def _copy(self, prompt: int) -> None:
        twice = [one for one in self.tiers["host"] if one in self.tiers["device"]]
        self._use("host", prompt, twice)
        self._use("storage", prompt)

    def _use(self, tier: str, prompt: int, first: Sequence[int] = ()) -> None:
        prompts, room = self.tiers[tier], self.rooms[tier]
        if prompt in prompts:
            prompts.remove(prompt)
        elif room and len(prompts) == room:
            prompts.remove(next(iter([*first, *prompts])))
        if room:
            prompts.append(prompt)


@pytest.mark.parametrize(("on_host", "in_files"), [(5, 0), (4, 6), (3, 100)])
def test_hits_by_tier_are_those_of_a_plain_model(on_host: int, in_files: int, tmp_path: Path) -> None:
    """Twelve prompts in random order, and room for three on the device."""
    asked = np.random.default_rng(on_host).integers(0, 12, 250).tolist()
    plain = PlainTiers(3, on_host, in_files)
    expected = [plain.ask(prompt) for prompt in asked]
    settings = (*HIRADIX, device(3), host(on_host), *(FILES if in_files else ()))
    cost = COST.with_tier(f"files:bytes={in_files * PAGES * 16 * 1e6}") if in_files else COST
    outcome, figures = simulate(trace(tmp_path / "trace.jsonl", asked), *settings, cost=cost)
    assert [found(record) for record in outcome.records] == expected
    for key, tier in TIERS.items():
        assert figures[key] == pytest.approx(expected.count(tier) * PAGES * 16 / (PROMPT * len(asked)))
    assert {"device", "host", "computed"} <= set(expected)
    assert ("storage" in expected) == bool(in_files)
    assert sum(figures[key] for key in TIERS) + figures["computed_share"] == pytest.approx(1)


def first_tokens(path: Path, settings: Sequence[str], cost: CostModel) -> list[float]:
    """Return TTFT of four prompts, and of the first one again, which has left the device by then."""
    outcome, _ = simulate(trace(path, [0, 1, 2, 3, 0]), *HIRADIX, device(2), *settings, cost=cost)
    return [record.first_token - record.arrived for record in outcome.records]


def test_a_load_takes_what_the_hosts_speed_says(tmp_path: Path) -> None:
    """256 tokens of 1 MB."""
    for speed in (10.0, 0.5):
        cost = COST.with_tier(f"host:read={speed},latency=0.003")
        *computed, loaded = first_tokens(tmp_path / "trace.jsonl", [host(8)], cost)
        assert computed == pytest.approx([0.0257] * 4)
        assert loaded == pytest.approx(0.01 + 0.003 + 0.256 / speed)


def test_a_load_hides_behind_the_pass_as_far_as_the_cost_model_says(tmp_path: Path) -> None:
    cost = COST.model_copy(update={"load_overlap": 0.75, "overhead": 1.0})
    *_, loaded = first_tokens(tmp_path / "trace.jsonl", [host(8)], cost)
    assert loaded == pytest.approx(1.01 + 0.0256 - 0.75 * 0.01)


def test_what_comes_from_a_storage_takes_what_its_speed_says(tmp_path: Path) -> None:
    """It is looked for, and fetched, while the gate looks every 2 ms; then it is loaded."""
    for speed in (5.0, 0.5):
        cost = COST.with_tier(f"files:read={speed},latency=0.02")
        *_, fetched = first_tokens(tmp_path / "trace.jsonl", [host(1), *FILES], cost)
        least = 0.02 + 0.02 + 0.256 / speed + 0.01 + 0.0256
        assert least <= fetched <= least + 0.007


def test_a_slow_storage_is_not_waited_for_longer_than_computing_takes(tmp_path: Path) -> None:
    """As the gate's clock and the speed of prefills are the lab's."""
    gate = ("gates=[{use: prefetch, threshold: 16}]",)
    cost = COST.with_tier("files:read=0.01")
    *computed, last = first_tokens(tmp_path / "trace.jsonl", [host(1), *FILES, *gate], cost)
    assert last <= 2 * max(computed[1:]) + 0.005


def test_tiers_that_are_not_needed_change_nothing() -> None:
    """Of a run whose pool holds everything, all figures are those of a run without tiers, to the last bit."""
    workload, pool = "chat:turns=3,output=8", "memory.max_total_tokens=400000"
    _, plain = simulate(workload, "prefix_cache.use=radix", pool, requests=60)
    _, tiered = simulate(workload, "prefix_cache.use=hiradix", pool, requests=60)
    assert tiered["saved_gb"] > 0
    assert tiered["hit_rate_device"] == tiered["hit_rate"] > 0.3
    assert not set(TIERS) & set(plain)
    for one in (plain, tiered):
        one.pop("wall")
    assert json.dumps({key: tiered[key] for key in plain}) == json.dumps(plain)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_host_pool_brings_what_the_device_lost(policy: str) -> None:
    tight = ("memory.max_total_tokens=8000", "memory.page_size=16")
    tiers = ("prefix_cache.use=hiradix", f"prefix_cache.write_policy={policy}", "memory.host.max_total_tokens=60000")
    workload = "chat:turns=5,output=32,think=20"
    _, plain = simulate(workload, *tight, "prefix_cache.use=radix", requests=200)
    _, tiered = simulate(workload, *tight, *tiers, requests=200)
    assert tiered["hit_rate_host"] > 0.03
    assert tiered["hit_rate"] > plain["hit_rate"] + 0.03
    assert tiered["loaded_gb"] == pytest.approx(tiered["load_share"] * tiered["duration"] * 10.0)


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "cost", "message"),
    [
        (["memory.storage=[files]", "prefix_cache.use=radix"], COST, r"memory\.storage: .*'radix'"),
        ([*HIRADIX, "memory.storage=[redis]"], COST, "'redis' is; say it: --tier redis:"),
        ([*HIRADIX, "memory.storage=[files]", "memory.storage_block=40"], COST, r"memory\.storage_block: .*make it 48"),
        (HIRADIX, CostModel(base=1, per_token=0), r"does not say what tiers cost \(kv_token_bytes, host\)"),
    ],
)
def test_configs_that_the_lab_cannot_simulate(settings: Sequence[str], cost: CostModel, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate("random", *settings, cost=cost)


@pytest.mark.parametrize("text", ["host", "host:read", "host:read=0", "host:bytes=3", "files:colour=3", ":read=1"])
def test_figures_of_a_tier_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--tier"):
        COST.with_tier(text)


def test_figures_of_a_tier_change_what_they_name() -> None:
    changed = COST.with_tier("files:read=2").with_tier("redis:read=1,write=3,bytes=7").with_tier("host:latency=1")
    assert changed.storages["files"] == StorageCost(read=2.0, write=5.0, latency=0.001)
    assert changed.storages["redis"] == StorageCost(read=1.0, write=3.0, bytes=7.0)
    assert changed.host == TierCost(read=10.0, write=10.0, latency=1.0)
    assert changed.model_copy(update={"storages": COST.storages, "host": COST.host}) == COST


def test_the_command_draws_hits_by_tier(tmp_path: Path) -> None:
    png = tmp_path / "lab.png"
    command = ["simulate", "chat:output=8", "--requests", "20", "--set", "memory.max_total_tokens=4000"]
    tiers = [
        "--tier",
        "host:read=1",
        "--run",
        "plain: prefix_cache.use=radix",
        "--run",
        "tiers: prefix_cache.use=hiradix",
    ]
    result = CliRunner().invoke(app, [*command, *tiers, "--png", str(png)])
    assert result.exit_code == 0, result.output
    assert "hits on the host" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")
