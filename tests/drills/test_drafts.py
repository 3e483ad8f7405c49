"""The speculator that misbehaves: what it drafts, and how it lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.api import DraftRow, SpeculatorContext
from pegboard.plugins.speculation.suite import SpeculatorContract
from pegboard.toolkit.sampling import tree
from pegboard_drills.drafts import DrillSpeculator
from pegboard_drills.lies import LIES
from pegboard_drills.options import DrillSpeculatorOptions, Lie

VOCAB = 500
PROMPT = [4, 9, 7]
OUTPUT = np.random.default_rng(0).integers(0, VOCAB, 400).tolist()
SPEC = ModelSpec("toy", VOCAB, 8, 4096, (), ())


USELESS = pytest.mark.filterwarnings("ignore::pegboard.conformance.suite.ConformanceWarning")
"""What makes noise is right by chance alone."""


@USELESS
class TestChains(SpeculatorContract):
    provider = "drill"
    options = {"noise": True}


@USELESS
class TestTrees(SpeculatorContract):
    provider = "drill"
    options = {"noise": True, "shape": "tree", "nodes": 64, "ragged": True}


def drill(**options: Any) -> DrillSpeculator:
    outputs = {"4 9 7": OUTPUT, "1": [2]}
    return DrillSpeculator(DrillSpeculatorOptions(**{"outputs": outputs, **options}), SpeculatorContext(SPEC, 64))


def row(done: int, prompt: list[int] = PROMPT, most: int = 64) -> DraftRow:
    return DraftRow(np.array(prompt + OUTPUT[:done], np.int64), len(prompt), "", most, {})


def fault_of(trees: TokenTrees, rows: list[DraftRow]) -> str | None:
    roots = np.array([one.tokens[-1] for one in rows], np.int64)
    return tree.fault(trees, roots, np.array([one.most for one in rows], np.int64), VOCAB)


def gained(trees: TokenTrees, done: int) -> int:
    """How many tokens a model gains that says just what is recorded."""
    drawn = np.array(OUTPUT + [-1] * 64, np.int64)[done + tree.depths(trees)]
    return int(tree.walk(trees, drawn).counts[0])


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("hit_rate", [0.0, 0.3, 0.7, 1.0])
def test_as_often_right_as_asked(shape: str, hit_rate: float) -> None:
    speculator = drill(shape=shape, hit_rate=hit_rate, nodes=8)
    hits, misses, done = 0, 0, 0
    while done < 350:
        here = row(done)
        trees = speculator.propose([here])
        assert fault_of(trees, [here]) is None
        found = gained(trees, done)
        hits += found - 1
        misses += found < 8
        done += found
    if shape == "chain":
        assert hits / max(1, hits + misses) == pytest.approx(hit_rate, abs=0.08)
    else:
        assert (hits > 0) == (hit_rate > 0)


def test_trees_have_wrong_siblings_and_many_shapes() -> None:
    speculator = drill(shape="tree", nodes=24, ragged=True)
    rows = [row(done) for done in range(40)]
    trees = speculator.propose(rows)
    assert fault_of(trees, rows) is None
    assert not tree.is_chain(trees)
    assert len({*trees.counts.tolist()}) > 8
    assert 1 in trees.counts


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_row_gets_the_same_tree_in_any_batch(shape: str) -> None:
    rows = [row(5, most=9), row(7), row(0, [1, 2])]
    options: Any = {"shape": shape, "hit_rate": 0.5, "noise": True}
    together = drill(**options).propose(rows)
    for place, one in enumerate(rows):
        alone = drill(**options).propose([DraftRow(one.tokens, one.input_len, "", one.most, {})])
        part = tree.take_part(together, np.array([place]))
        assert [*map(list, (alone.counts, alone.tokens, alone.parents))] == [
            *map(list, (part.counts, part.tokens, part.parents))
        ]


def test_what_is_not_recorded_is_noise_or_not_drafted() -> None:
    rows = [row(0, [3, 3]), row(len(OUTPUT)), row(len(OUTPUT) - 2)]
    assert drill().propose(rows).counts.tolist() == [1, 1, 3]
    trees = drill(noise=True).propose(rows)
    assert trees.counts.tolist() == [8, 8, 8]
    assert fault_of(trees, rows) is None


def test_outputs_may_be_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps({"4 9 7": OUTPUT}), "utf-8")
    trees = drill(outputs={}, file=str(path)).propose([row(3)])
    assert trees.tokens[1:].tolist() == OUTPUT[3:10]


@pytest.mark.parametrize("lie", [lie for lie in LIES if lie not in ("no", "nothing")])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_each_lie_is_noticed(lie: str, shape: str) -> None:
    rows = [row(3), row(8)]
    speculator = drill(lies=lie, shape=shape, every=2)
    assert fault_of(speculator.propose(rows), rows) is None
    assert fault_of(speculator.propose(rows), rows) is not None


def test_all_lies_can_be_asked_for() -> None:
    assert set(get_args(Lie)) == set(LIES)
    assert drill(lies="nothing").propose([row(3)]) is None


@pytest.mark.parametrize("where", ["concerns", "propose", "learn"])
def test_it_raises_as_asked(where: str) -> None:
    speculator = drill(raises=where)
    calls: dict[str, Any] = {
        "concerns": lambda: speculator.concerns(SamplingParams()),
        "propose": lambda: speculator.propose([row(1)]),
        "learn": lambda: speculator.learn([], np.empty(0, np.int64), np.empty(0, np.int64)),
    }
    for name, call in calls.items():
        if name == where:
            with pytest.raises(RuntimeError, match="as asked"):
                call()
        else:
            call()
