"""Sections of layers on ranks of their own, as threads: answers are those of one process; each has its own layers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.config.compose import compose
from pegboard.core.engine.choose import Loaded, with_memory
from pegboard.core.engine.engine import Engine
from pegboard.core.engine.following import FollowingModel
from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.errors import ConfigError, ModelError
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.kv_pool import KVPool
from pegboard.plugins.model_dense.network import DenseNetwork
from tests.e2e.reference import Comparison, Reference
from tests.parallel.rank_threads import in_threads
from tests.parallel.test_works import LENGTH, PROMPTS, TOLERANCE, asked, config

LAYERS = 3


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama", num_hidden_layers=LAYERS)


def right(engine: Engine, model: Path, reference_dir: Path) -> None:
    answers, comparison = engine.run(asked()), Comparison()
    for answer, expected in zip(answers, Reference(model, reference_dir).answers(PROMPTS, LENGTH), strict=True):
        comparison.add(answer.token_ids, expected, answer.rid)
    comparison.finish()
    stats = engine.stats()
    assert stats["book_errors"] == stats["failed_batches"] == 0


@pytest.mark.parametrize(
    ("tensor", "pipeline", "communicator", "scheduler"),
    [
        (1, 2, "shm", {}),
        (1, 3, "gloo", {"loop": "normal", "chunked_prefill_size": 0, "mixed_chunk": False}),
        (2, 2, "shm", {"mixed_chunk": False}),
    ],
)
def test_greedy_answers_are_those_of_transformers(
    tensor: int, pipeline: int, communicator: str, scheduler: dict[str, Any], model: Path, reference_dir: Path
) -> None:
    data = config(model)
    data["scheduler"] |= scheduler
    ranks = in_threads(data, tensor, pipeline=pipeline, communicator={"use": communicator})
    with Engine(ranks) as engine:
        right(engine, model, reference_dir)


@pytest.mark.parametrize(("loop", "lanes"), [("auto", 2), ("normal", 1)])
def test_two_batches_are_under_way(loop: str, lanes: int, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second section is slow; the first one goes on with other requests meanwhile, where the loop has two lanes."""
    run, log = FollowingModel.run, []

    def slow(self: FollowingModel, work: ModelWorkerBatch) -> None:
        time.sleep(0.003)
        run(self, work)

    monkeypatch.setattr(FollowingModel, "run", slow)
    data = config(model)
    data["scheduler"] |= {"loop": loop, "mixed_chunk": False}
    with Engine(in_threads(data, 1, pipeline=2)) as engine:
        network = engine.built.runner.ctx.network
        assert network is not None
        forward = network.forward

        def noted(batch: ForwardBatch) -> Any:
            rows = frozenset(batch.req_pool_indices.tolist())
            log.append((rows, True))
            hidden = forward(batch)
            log.append((rows, False))
            return hidden

        monkeypatch.setattr(network, "forward", noted)
        engine.run(asked([[5 + number, 7] for number in range(8)]))
    together: list[frozenset[int]] = []
    most = 0
    for rows, begins in log:
        if begins:
            assert not any(rows & other for other in together), "a request is in two batches at once"
            together.append(rows)
        else:
            together.remove(rows)
        most = max(most, len(together))
    assert most == lanes


def test_all_that_is_read_of_a_pass(model: Path) -> None:
    """Logprobs of outputs and prompts, and embeddings: they come from rows that the last section sends back."""
    requests = asked(logprobs=2, logprob_start=1)
    with Engine(in_threads(config(model), 1, pipeline=2)) as engine:
        found, vectors = engine.run(requests), engine.embed([list(range(5, 60))])
    with Engine(compose(data=config(model), env={})) as engine:
        expected, others = engine.run(asked(logprobs=2, logprob_start=1)), engine.embed([list(range(5, 60))])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        for one, other in ((ours.logprobs, theirs.logprobs), (ours.input_logprobs, theirs.input_logprobs)):
            assert one is not None
            assert other is not None
            assert len(one) == len(other) > 1
            for (value, token, _), (same, name, _) in zip(one, other, strict=True):
                assert token == name
                assert value == pytest.approx(same, abs=TOLERANCE)
    assert vectors[0].vector == pytest.approx(others[0].vector, abs=TOLERANCE)


def test_each_rank_has_its_layers_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and KV; together they have all of them, once."""
    networks: list[object] = []
    pools: list[KVPool] = []

    def seen(*given: Any) -> Loaded:
        loaded = with_memory(*given)
        networks.append(loaded.runner.ctx.network)
        pools.append(loaded.memory.pool)
        return loaded

    monkeypatch.setattr("pegboard.core.engine.following.with_memory", seen)
    with Engine(in_threads(config(model), 1, pipeline=2, layers=[1, 2])) as engine:
        networks.insert(0, engine.built.runner.ctx.network)
        pools.insert(0, engine.built.pool)
        assert [pool.layer_ids for pool in pools] == [(0,), (1, 2)]
        assert pools[1].nbytes == 2 * pools[0].nbytes
    first, second = networks
    assert isinstance(first, DenseNetwork)
    assert isinstance(second, DenseNetwork)
    with Engine(compose(data=config(model), env={})) as engine:
        whole = engine.built.runner.ctx.network
        assert isinstance(whole, DenseNetwork)
        sizes = [sum(weight.numel() for weight in one.parameters()) for one in (first, second, whole)]
        assert sizes[0] + sizes[1] == sizes[2]
        there = whole.state_dict()
    assert torch.equal(second.state_dict()["layers.0.o.weight"], there["layers.1.o.weight"])
    assert torch.equal(second.state_dict()["norm.weight"], there["norm.weight"])
    assert first.head is not None
    assert torch.equal(first.head.weight, there["head.weight"])


def test_layers_are_divided_by_their_bytes(model: Path) -> None:
    """The first section also has the embeddings and the head, which are most of this model."""
    with Engine(in_threads(config(model), 1, pipeline=2)) as engine:
        assert engine.built.pool.layer_ids == (0,)


@pytest.mark.parametrize(
    ("more", "parallel", "said"),
    [
        ({"runner": {"use": "cpu_native"}}, {}, "each of its ranks computes all layers, and parallel.pipeline is 2"),
        ({"model": {"use": "transformers"}}, {}, "it computes on one rank, and parallel.pipeline is 2"),
        ({"speculation": {"use": "ngram"}}, {}, "brings tokens ahead, which does not work on 2 ranks"),
        ({"prefix_cache": {"use": "hiradix"}}, {}, "the prefix cache 'hiradix' keeps KV beyond the device"),
        ({}, {"pipeline": 4}, "3 layers do not make 4 sections; it may be at most 3"),
        ({}, {"layers": [1, 1]}, "[1, 1], but 3 layers are to be divided among 2 sections"),
        ({}, {"layers": [3]}, "layers has 1 numbers, and pipeline makes 2 sections"),
    ],
    ids=["native", "transformers", "speculation", "tiers", "sections", "layers", "count"],
)
def test_what_does_not_work_is_refused(
    model: Path, more: dict[str, Any], parallel: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before weights are read, and before any rank is started."""
    monkeypatch.setattr("pegboard.core.engine.build.load_model", lambda *args: pytest.fail("weights are read"))
    whole = config(model)
    whole |= {name: {**whole.get(name, {}), **part} for name, part in more.items()}
    with pytest.raises((ConfigError, ModelError)) as caught:
        Engine(in_threads(whole, 1, **{"pipeline": 2, **parallel}))
    assert said in str(caught.value)


def test_windows_with_groups_of_their_own_are_refused(checkpoints: Path) -> None:
    directory = tiny_checkpoint(checkpoints, "mistral", sliding_window=16)
    with pytest.raises(ConfigError, match=r"which sections of layers do not have; set memory\.window_pages"):
        Engine(in_threads(config(directory, memory={"window_pages": True}), 1, pipeline=2))


@pytest.mark.full
def test_windows_in_one_group(checkpoints: Path, reference_dir: Path) -> None:
    """Only some layers have one, and they are in one section alone."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    directory = tiny_checkpoint(
        checkpoints, "qwen2", use_sliding_window=True, sliding_window=16, layer_types=kinds, max_window_layers=1
    )
    with Engine(in_threads(config(directory), 1, pipeline=3)) as engine:
        right(engine, directory, reference_dir)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "qwen2"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_other_models(architecture: str, tensor: int, checkpoints: Path, reference_dir: Path) -> None:
    """Experts in some layers, tied embeddings, biases."""
    directory = tiny_checkpoint(checkpoints, architecture)
    with Engine(in_threads(config(directory), tensor, pipeline=2)) as engine:
        right(engine, directory, reference_dir)
