"""The policy lab: workloads are what they say, time is what the cost model says, and figures add up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pegboard.core.cli.main import app
from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.tools.lab.assemble import resolve
from pegboard.tools.lab.cost import CostModel, cost_names, load_cost
from pegboard.tools.lab.report import fairness, summarise
from pegboard.tools.lab.run import Outcome, Record, Simulation
from pegboard.tools.lab.workloads import WORKLOADS, WorkloadChoice

COST = CostModel(base=0.01, per_token=0.0001, per_context_token=1e-8)


def simulate(
    workload: str,
    *overrides: str,
    requests: int = 60,
    rate: float = 20.0,
    seed: int = 0,
    cost: CostModel = COST,
    rates: Sequence[float] = (),
) -> tuple[Outcome, dict[str, Any]]:
    built = WorkloadChoice.parse(workload).build(requests, rate, seed)
    outcome = Simulation("run", resolve((), overrides), built, cost, rates=rates).run()
    return outcome, summarise(outcome)


# ---- cost ---------------------------------------------------------------------------------------------------------


def batch(extend: list[int], context: list[int]) -> ModelWorkerBatch:
    none: Any = None
    ints = np.array(extend, np.int64)
    return ModelWorkerBatch(
        1, ForwardMode.EXTEND, none, none, none, np.array(context, np.int64), ints, none, none, none, none, none
    )


def test_a_pass_costs_weights_or_tokens_whichever_is_more() -> None:
    model = CostModel(base=1.0, per_token=0.1)
    assert model.seconds(batch([1], [5])) == model.seconds(batch([10], [10])) == 1.0
    assert model.seconds(batch([20], [20])) == pytest.approx(2.0)


def test_context_pairs_and_requests_are_added() -> None:
    model = CostModel(base=0, per_token=0, per_context_token=1, per_pair=1000, per_request=1_000_000, overhead=0.5)
    # 3 new tokens behind 4: token by token they see 5, 6 and 7 tokens.
    assert model.seconds(batch([3], [7])) == 0.5 + 7 + 18_000 + 1_000_000
    assert model.seconds(batch([1, 1], [4, 6])) == 0.5 + 10 + 10_000 + 2_000_000


@pytest.mark.parametrize("name", cost_names())
def test_cost_models_that_come_along(name: str) -> None:
    model = load_cost(name)
    assert model.name == name
    assert model.source
    assert 0 < model.seconds(batch([1], [100])) < model.seconds(batch([4096], [4096]))


def test_cost_models_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"base": 0.5, "per_token": 0.0}))
    assert load_cost(str(path)).base == 0.5
    path.write_text('{"base": -1, "per_token": 0, "colour": 3}')
    with pytest.raises(ConfigError, match=r"(?s)base.*colour"):
        load_cost(str(path))
    with pytest.raises(ConfigError, match="did you mean 'h200-8b'"):
        load_cost("h200-8")
    with pytest.raises(ConfigError, match="No such file"):
        load_cost("nowhere.yaml")


# ---- workloads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_draws_the_same_workload(name: str) -> None:
    runs = [list(islice(WorkloadChoice.parse(name).build(40, 5.0, seed).arrivals(), 40)) for seed in (3, 3, 4)]
    drawn = [[(ask.at, ask.prompt().tolist(), ask.output_len) for ask in run] for run in runs]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert all(earlier.at <= later.at for earlier, later in zip(runs[0], runs[0][1:], strict=False))
    assert all(ask.limit >= ask.output_len for ask in runs[0])


def test_groups_share_their_system_prompt() -> None:
    asks = list(
        WorkloadChoice.parse("shared-prefix:groups=3,system=50,question=7,output=9").build(30, 5.0, 0).arrivals()
    )
    stems = {ask.group: ask.prompt()[:50].tobytes() for ask in asks}
    assert len(set(stems.values())) == len(stems) == 3
    assert all(ask.prompt()[:50].tobytes() == stems[ask.group] for ask in asks)
    assert len({ask.prompt()[50:].tobytes() for ask in asks}) == 30
    assert {(len(ask.prompt()), ask.output_len) for ask in asks} == {(57, 9)}


def test_the_rate_is_kept() -> None:
    asks = list(WorkloadChoice.parse("random").build(4000, 50.0, 0).arrivals())
    assert asks[-1].at == pytest.approx(80, rel=0.06)
    at_once = list(WorkloadChoice.parse("random").build(10, float("inf"), 0).arrivals())
    assert {ask.at for ask in at_once} == {0.0}


def test_a_turn_comes_after_the_answer_and_contains_it() -> None:
    (first,) = WorkloadChoice.parse("chat:turns=2,think=3").build(2, 1.0, 0).arrivals()
    whole = np.concatenate([first.prompt(), [77, 78, 2]])
    assert first.then is not None
    (second,) = first.then(100.0, whole)
    assert second.at > 100.0
    assert second.prompt()[: len(whole)].tolist() == whole.tolist()
    assert second.then is None


def test_calls_branch_out() -> None:
    (root,) = WorkloadChoice.parse("agents:depth=3,branch=4").build(21, 1.0, 0).arrivals()
    assert root.then is not None
    children = root.then(1.0, root.prompt())
    assert len(children) == 4
    assert children[0].then is not None
    assert len(children[0].then(2.0, children[0].prompt())) == 4


def test_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 2.0, "input_length": 700, "output_length": 5, "hash_ids": [7]},
        {"timestamp": 1.0, "input_length": 600, "output_length": 6, "hash_ids": [7], "group": "g", "priority": 3},
        {"timestamp": 3.0, "prompt": [11, 12, 13], "output_length": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second, third = WorkloadChoice.parse(f"{path}").build(10, 1.0, 0).arrivals()
    assert (first.at, first.group, first.priority, len(first.prompt())) == (1.0, "g", 3, 600)
    assert first.prompt()[:512].tolist() == second.prompt()[:512].tolist()
    assert first.prompt()[512:].tolist() != second.prompt()[512:600].tolist()
    assert third.prompt().tolist() == [11, 12, 13]
    outcome, _ = simulate(str(path))
    assert [record.output_len for record in outcome.records] == [6, 5, 1]
    path.write_text('{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match="line 1"):
        simulate(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shared", "did you mean 'shared-prefix'"),
        ("random:inptu=3", "did you mean 'input'"),
        ("random:input", "key=number"),
        ("nowhere.jsonl", "no such file"),
    ],
)
def test_workloads_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorkloadChoice.parse(text).build(1, 1.0, 0)


# ---- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_everybody_is_served_to_the_end(name: str) -> None:
    outcome, figures = simulate(name, "memory.max_total_tokens=20000")
    assert figures["finished"] == figures["requests"] >= 40
    assert figures["book_errors"] == figures["rejected"] == 0
    for record in outcome.records:
        assert record.arrived <= record.scheduled <= record.first_token <= record.finished
        assert record.output_len >= 1


def test_the_same_run_twice_is_the_same() -> None:
    first, second = (simulate("chat", "memory.max_total_tokens=20000")[1] for _ in range(2))
    for one in (first, second):
        one.pop("wall")
    assert first == second


def test_virtual_time_is_the_cost_models() -> None:
    """One request alone: a prefill and nine decode steps at the base cost each."""
    cost = CostModel(base=0.25, per_token=0.0)
    outcome, figures = simulate("random:input=50,output=10,spread=0", requests=1, cost=cost)
    (record,) = outcome.records
    assert record.first_token - record.arrived == pytest.approx(0.25)
    assert record.finished - record.arrived == pytest.approx(2.5)
    assert figures["tpot"]["mean"] == pytest.approx(0.25)
    assert figures["itl"]["p50"] == pytest.approx(0.25, rel=0.06)


def test_drafts_are_accepted_as_often_as_the_lab_is_told() -> None:
    """By depth: a step gains 1 + 0.8 + 0.8 x 0.5 tokens."""
    workload = "random:input=50,output=200,spread=0"
    outcome, figures = simulate(workload, "speculation.adaptive=false", requests=30, rate=0.1, rates=(0.8, 0.5))
    plain, before = simulate(workload, requests=30, rate=0.1)
    assert figures["accept_length"] == pytest.approx(2.2, abs=0.1)
    assert before["decode_steps"] / figures["decode_steps"] == pytest.approx(2.2, rel=0.1)
    assert [one.output_len for one in outcome.records] == [one.output_len for one in plain.records]
    assert figures["book_errors"] == 0


def test_adaptive_drafting_goes_by_virtual_time() -> None:
    """Where a token costs as much as a pass, no drafts pay; where it costs nothing, they do."""
    workload = "random:input=50,output=200,spread=0"
    dear, free = CostModel(base=0.01, per_token=0.01), CostModel(base=0.01, per_token=0.0)
    _, few = simulate(workload, requests=4, rate=0.2, cost=dear, rates=(0.7, 0.7))
    _, many = simulate(workload, requests=4, rate=0.2, cost=free, rates=(0.7, 0.7))
    assert few["decode_steps"] > 1.5 * many["decode_steps"]


def test_the_optimal_hit_rate_is_what_an_infinite_cache_finds() -> None:
    """Eight questions behind one system prompt of 100 tokens: seven of them can find it, and nothing else."""
    workload = "shared-prefix:groups=1,system=100,question=20,output=4"
    outcome, figures = simulate(workload, "memory.max_total_tokens=20000", requests=8, rate=0.5)
    assert outcome.optimal_cached == 700
    assert figures["optimal_hit_rate"] == pytest.approx(700 / 960)
    assert figures["hit_rate_of_optimal"] == pytest.approx(1.0)


def test_a_tight_pool_retracts_and_loses_nobody() -> None:
    # Admission reckons with one token of output, so memory runs out under way.
    settings = ("memory.max_total_tokens=1500", "scheduler.estimate_max_new_tokens=1")
    outcome, figures = simulate("random:input=100,output=200", *settings, rate=1000.0)
    assert figures["retractions"] > 0
    assert figures["finished"] == 60
    assert sum(record.retractions for record in outcome.records) == figures["retractions"]


def test_requests_that_do_not_fit_are_counted() -> None:
    _, figures = simulate("random:input=400,output=10,spread=0.9", "memory.max_total_tokens=300")
    assert figures["rejected"] > 0
    assert figures["finished"] + figures["rejected"] == figures["requests"]


def test_equal_first_tokens_by_chance_are_no_hit_rate() -> None:
    _, figures = simulate("random", requests=300)
    assert figures["optimal_hit_rate"] < 0.001
    assert figures["hit_rate_of_optimal"] is None


def test_pictures_without_a_hit_rate_show_who_waited(tmp_path: Path) -> None:
    png = tmp_path / "lab.png"
    arguments = ["simulate", "random:input=50,output=5,urgent=0.5", "--requests", "20", "--png", str(png)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert png.read_bytes().startswith(b"\x89PNG")


def test_fairness_is_jains_index() -> None:
    def record(group: str, seconds: float) -> Record:
        return Record(group, 0, 0.0, 10, output_len=1, finished=seconds)

    assert fairness([record("a", 3), record("b", 3), record("b", 3)]) == pytest.approx(1.0)
    assert fairness([record("a", 1), record("b", 3)]) == pytest.approx(16 / 20)


def test_gates_work_in_virtual_time() -> None:
    _, figures = simulate("random", "gates=[{use: drill, act: delay, delay: 3.0}]", requests=5)
    assert figures["queue"]["p50"] >= 3.0


def test_the_overlap_loop_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"scheduler\.loop"):
        simulate("random", "scheduler.loop=overlap")


# ---- the command --------------------------------------------------------------------------------------------------

ARGUMENTS = ["simulate", "shared-prefix:groups=4,system=64,output=8", "--requests", "20", "--cost", "h200-8b"]


def test_the_command_prints_a_table_and_writes_files(tmp_path: Path) -> None:
    png, figures = tmp_path / "lab.png", tmp_path / "lab.json"
    more = ["--compare", "scheduler.policy.use=fcfs,lpm", "--png", str(png), "--json", str(figures)]
    result = CliRunner().invoke(app, [*ARGUMENTS, *more])
    assert result.exit_code == 0, result.output
    assert "hit rate" in result.output
    assert "fcfs" in result.output
    assert [one["label"] for one in json.loads(figures.read_text())] == ["fcfs", "lpm"]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_runs_with_settings_of_their_own(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text("scheduler: {policy: {use: fcfs}}\nmemory: {max_total_tokens: 4096}\n")
    runs = ["--run", "a: scheduler.policy.use=lpm scheduler.policy.fallback_above=0", "--run", "b:"]
    result = CliRunner().invoke(app, [*ARGUMENTS, "--config", str(config), *runs, "--json", "-"])
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)
    assert (first["label"], first["fallback_share"]) == ("a", 0.0)
    assert (second["label"], second["fallback_share"]) == ("b", None)


@pytest.mark.parametrize(
    "more",
    [
        ["--rate", "0"],
        ["--compare", "scheduler.policy.use"],
        ["--run", "no label"],
        ["--cost", "x"],
        ["--rate", "nan"],
        ["--accept", "0.5,2"],
        ["--accept", "often"],
    ],
)
def test_what_the_command_refuses(more: list[str]) -> None:
    result = CliRunner().invoke(app, [*ARGUMENTS, *more])
    assert isinstance(result.exception, ConfigError)


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys\nfrom pegboard.core.cli.main import app\n"
        f"try:\n    app({ARGUMENTS!r})\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


# ---- what the lab is for ------------------------------------------------------------------------------------------

GROUPS = "shared-prefix:groups=48,system=1024,question=96,output=64"
FCFS = ("scheduler.policy.use=fcfs",)
LPM = ("scheduler.policy.use=lpm", "scheduler.policy.fallback_above=0")
DFS = ("scheduler.policy.use=dfs-weight", "scheduler.policy.fallback_above=0")


@pytest.mark.parametrize("aware", [LPM, DFS], ids=["lpm", "dfs-weight"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 3))])
def test_cache_aware_policies_beat_fcfs_on_hit_rate(aware: tuple[str, ...], seed: int) -> None:
    """A queue of requests of 48 groups, and room for the system prompts of a quarter of them."""
    pool = ("memory.max_total_tokens=16000",)
    _, plain = simulate(GROUPS, *FCFS, *pool, requests=480, rate=200.0, seed=seed)
    _, found = simulate(GROUPS, *aware, *pool, requests=480, rate=200.0, seed=seed)
    assert found["fallback_share"] == 0.0
    assert found["hit_rate"] > plain["hit_rate"] + 0.2
    assert found["hit_rate_of_optimal"] > 0.9
    assert plain["hit_rate_of_optimal"] < 0.75
    assert found["duration"] < plain["duration"]


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_nobody_waits_longer_than_the_bound_of_aging(seed: int) -> None:
    """Urgent requests (priority 10) alone keep the engine busy for minutes. Without aging the others wait for all of
    them. With it nobody is overtaken by those who arrive more than 10 points x aging after it, so it starts no later
    than, first come first served, somebody would who came that much later.
    """
    workload, aging = "random:input=400,output=100,spread=0.5,urgent=0.85", 1.0
    pool = ("memory.max_total_tokens=6000", "scheduler.max_running_requests=16")
    busy = {"requests": 800, "rate": 16.0, "seed": seed}
    cost = CostModel(base=0.02, per_token=0.0002)
    _, plain = simulate(workload, *FCFS, *pool, cost=cost, **busy)  # type: ignore[arg-type]
    bound = plain["max_queue"] + 10 * aging
    priority = ("scheduler.policy.use=priority", "scheduler.policy.preempt=false")
    starved, _ = simulate(workload, *priority, "scheduler.policy.aging=null", *pool, cost=cost, **busy)  # type: ignore[arg-type]
    aged, figures = simulate(workload, *priority, f"scheduler.policy.aging={aging}", *pool, cost=cost, **busy)  # type: ignore[arg-type]

    def longest(outcome: Outcome, priority: int) -> float:
        return max(r.scheduled - r.arrived for r in outcome.records if r.priority == priority)

    assert longest(starved, 0) > bound, "the workload is meant to starve the others"
    assert figures["max_queue"] <= bound
    urgent = [r.scheduled - r.arrived for r in aged.records if r.priority == 10]
    others = [r.scheduled - r.arrived for r in aged.records if r.priority == 0]
    assert np.median(urgent) < np.median(others), "priority still counts"
