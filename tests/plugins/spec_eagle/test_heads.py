"""Heads of every layout and flag: their entries and trees are those of a plain statement made of transformers' parts,
after cached prefixes, chunks, retractions and accepted runs; and no answer changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.toolkit import kernels
from pegboard.toolkit.kernels import operations
from tests.plugins.spec_eagle.heads import HEADS_BY_NAME, LAYERS, VOCAB, Head
from tests.plugins.spec_eagle.watched import watched_engine

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=10, ignore_eos=True)
TREE: dict[str, Any] = {"topk": 3, "steps": 4, "num_draft_tokens": 10}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("models"), "llama")


def some_prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Prompts of 1 to 60 tokens; every other one begins as the first does."""
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(3, VOCAB, int(draw.integers(1, 30))).tolist() for _ in range(count)]
    stem = draw.integers(3, VOCAB, 40).tolist()
    return [stem + one if index % 2 == 0 else one for index, one in enumerate(prompts)]


def endless(length: int) -> SamplingParams:
    """Never the end of text; but admission does not know that, so that running requests have to go."""
    return SamplingParams(temperature=0.0, max_new_tokens=length, logit_bias={2: -100.0})


def plain_answers(model: Path, prompts: list[list[int]], length: int) -> dict[tuple[int, ...], list[int]]:
    config = {"model": {"path": str(model), "dtype": "float32"}, "runner": {"use": "layered"}, "log_level": "error"}
    with Engine.from_config({**config, "memory": {"max_total_tokens": 4096}}) as engine:
        outputs = engine.generate(prompts, endless(length))
    return {tuple(prompt): list(one.token_ids) for prompt, one in zip(prompts, outputs, strict=True)}


@pytest.mark.parametrize("name", HEADS_BY_NAME)
def test_every_head(name: str, model: Path, tmp_path: Path) -> None:
    """Trees of heads in each layout, and the entries that stand."""
    head = HEADS_BY_NAME[name]
    with watched_engine(model, head.write(tmp_path), head, **TREE) as (engine, watch):
        engine.generate(some_prompts(3), GREEDY)
        stats = engine.stats()
    assert not watch.errors, watch.errors[:3]
    assert watch.trees > 5
    assert watch.deepest > 1
    assert watch.entries > 100
    assert stats["plugin_failures"] == stats["failed_batches"] == stats["book_errors"] == 0


@pytest.mark.full
@pytest.mark.usefixtures("interpreted_triton")
def test_in_kernels(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels may be used, one stores the head's keys and values, too, and trees are what they were."""
    head, stored = HEADS_BY_NAME["qwen3"], set()
    fused = operations.qk_norm_rope_store

    def noted(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, store: operations.Store, *rest: Any) -> Tensor:
        stored.add(store.keys.data_ptr())
        return fused(q, k, v, cos, sin, store, *rest)

    monkeypatch.setattr(operations, "qk_norm_rope_store", noted)
    with kernels.allowed("cpu"), watched_engine(model, head.write(tmp_path), head, topk=2, steps=2) as (engine, watch):
        engine.generate(some_prompts(2), SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True))
        stats = engine.stats()
    assert not watch.errors, watch.errors[:3]
    assert watch.entries > 10
    assert watch.trees > 0
    assert len(stored) == LAYERS + 1
    assert stats["failed_batches"] == 0


SETTINGS: dict[str, dict[str, Any]] = {
    "chain": {"steps": 3, "topk": 1},
    "chunks": {**TREE, "scheduler": {"chunked_prefill_size": 32}},
    "chunks_16": {
        **TREE,
        "scheduler": {"chunked_prefill_size": 32, "mixed_chunk": True, "loop": "overlap"},
        "memory": {"max_total_tokens": 4096, "page_size": 16},
    },
    "tight": {"topk": 2, "steps": 3, "scheduler": {"estimate_max_new_tokens": 1}, "memory": {"max_total_tokens": 160}},
    "tight_16": {
        "topk": 2,
        "steps": 3,
        "scheduler": {"estimate_max_new_tokens": 1},
        "memory": {"max_total_tokens": 192, "page_size": 16},
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_whatever_happens(name: str, model: Path, tmp_path: Path) -> None:
    """After hits of the cache, chunks, retractions and accepted runs. Answers are those without drafts."""
    prompts, head = some_prompts(6), Head()
    length = 60 if name.startswith("tight") else 24
    expected = plain_answers(model, prompts, length)
    params = endless(length)
    with watched_engine(model, head.write(tmp_path), head, expected, **SETTINGS[name]) as (engine, watch):
        outputs = engine.generate(prompts, params)
        again = engine.generate(prompts[::-1], params)[::-1]
        stats = engine.stats()
    assert not watch.errors, watch.errors[:3]
    for found in (outputs, again):
        assert [list(one.token_ids) for one in found] == list(expected.values())
    assert watch.looked_back > 2
    assert stats["accepted_tokens"] > 60
    assert stats["drafted_tokens"] > stats["accepted_tokens"]
    assert bool(stats["retractions"]) == name.startswith("tight")
    assert stats["plugin_failures"] == stats["failed_batches"] == stats["book_errors"] == 0


def test_thresholds_of_nothing_accept_everything(model: Path, tmp_path: Path) -> None:
    """Judged by the head's own options. Greedy requests keep their answers."""
    prompts, head = some_prompts(4), Head()
    expected = plain_answers(model, prompts, 12)
    drawn = SamplingParams(temperature=1.0, seed=3, max_new_tokens=12, ignore_eos=True)
    options = {"accept": "thresholds", "accept_threshold_single": 0.0, "accept_threshold_acc": 0.0}
    with watched_engine(model, head.write(tmp_path), head, None, steps=3, **options) as (engine, watch):
        greedy = engine.generate(prompts, endless(12))
        before = engine.stats()
        engine.generate(prompts, drawn)
        stats = engine.stats()
    assert not watch.errors, watch.errors[:3]
    assert [list(one.token_ids) for one in greedy] == list(expected.values())
    assert stats["accepted_tokens"] - before["accepted_tokens"] > 20
    assert stats["accepted_tokens"] - before["accepted_tokens"] == stats["drafted_tokens"] - before["drafted_tokens"]
    assert stats["plugin_failures"] == stats["failed_batches"] == stats["book_errors"] == 0


def test_a_failed_pass_leaves_nothing_of_an_earlier_request(model: Path, tmp_path: Path) -> None:
    """A row is used again by a request as long, whose first pass could not be observed: it gets no drafts."""
    first, second = some_prompts(2, seed=5)
    second = second[:1] + first[1:]
    head = Head()
    with watched_engine(model, head.write(tmp_path), head, steps=3) as (engine, watch):
        engine.generate([first], endless(1))
        before = engine.stats()["drafted_tokens"]
        watch.fail = 1
        engine.generate([second], endless(6))
        stats = engine.stats()
    assert watch.fail == 0
    assert not watch.errors, watch.errors[:3]
    assert stats["plugin_failures"] == 1
    assert stats["drafted_tokens"] == before
