"""What works on several ranks, what is refused, and what an error does to them. Ranks are threads."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.config.compose import compose
from pegboard.core.engine import build, following
from pegboard.core.engine.choose import pages_for
from pegboard.core.engine.engine import Engine
from pegboard.core.engine.followers import facts
from pegboard.core.engine.following import FollowingModel
from pegboard.core.interfaces.batch import ModelWorkerBatch, TableChanges
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import ConfigError, ModelError, OutOfMemory
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.core.pipeline.recovery import DeviceFailed
from pegboard.plugins.model_dense.network import DenseNetwork
from pegboard.plugins.parallel.group import GroupLost
from pegboard.toolkit.model.moe import MixtureOfExperts
from tests.e2e.reference import Comparison, Reference
from tests.parallel.rank_threads import in_threads, registry

LENGTH = 24
PAGE = 1
"""Tokens; `memory.page_size` as it is by default."""
PROMPTS = ([5, 6, 7, 8], [9, 10, 11] * 20, [40, 41] * 9, [9, 10, 11] * 15 + [3])
SOME = np.arange(1)
TOLERANCE = 1e-3
"""Of logprobs and unit vectors: float32, summed in another order."""


def config(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "attention": {"use": "torch"},
        "memory": {"max_total_tokens": 2048},
        "scheduler": {"loop": "overlap", "chunked_prefill_size": 32, "mixed_chunk": True},
        "log_level": "warning",
        **more,
    }


@pytest.fixture(scope="module")
def model(checkpoints: Path) -> Path:
    return tiny_checkpoint(checkpoints, "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def two(model: Path) -> Iterator[Engine]:
    with Engine(in_threads(config(model), 2)) as engine:
        yield engine
        assert engine.stats()["book_errors"] == 0


@pytest.fixture(scope="module")
def one(model: Path) -> Iterator[Engine]:
    with Engine(compose(data=config(model), env={})) as engine:
        yield engine


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=LENGTH, **more)


def asked(prompts: Sequence[list[int]] = PROMPTS, **more: Any) -> list[GenerateRequest]:
    params = greedy(ignore_eos=True)
    return [GenerateRequest(prompt=ids, rid=f"r{at}", sampling=params, **more) for at, ids in enumerate(prompts)]


def test_greedy_answers_are_those_of_transformers(two: Engine, model: Path, reference_dir: Path) -> None:
    answers, comparison = two.run(asked()), Comparison()
    reference = Reference(model, reference_dir)
    for answer, expected in zip(answers, reference.answers(PROMPTS, LENGTH), strict=True):
        comparison.add(answer.token_ids, expected, answer.rid)
    comparison.finish()


@pytest.mark.full
def test_logprobs_of_prompts_and_answers(one: Engine, two: Engine) -> None:
    ours, theirs = (engine.run(asked(logprobs=2, logprob_start=1)) for engine in (two, one))
    for found, expected in zip(ours, theirs, strict=True):
        assert found.input_logprobs is not None
        assert expected.input_logprobs is not None
        assert len(found.input_logprobs) == len(expected.input_logprobs) > 1
        for (value, token, _), (other, same, _) in zip(found.input_logprobs, expected.input_logprobs, strict=True):
            assert token == same
            assert value == pytest.approx(other, abs=TOLERANCE)


@pytest.mark.full
def test_embeddings(one: Engine, two: Engine) -> None:
    (ours,), (theirs,) = (engine.embed([list(range(5, 60))]) for engine in (two, one))
    assert ours.vector == pytest.approx(theirs.vector, abs=TOLERANCE)


def grammar(kind: Any, text: str) -> SamplingParams:
    return SamplingParams(grammar=Grammar(kind, text), temperature=0.0, max_new_tokens=200)


@pytest.mark.full
def test_grammars(two: Engine) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=40)
    requests = [
        GenerateRequest(prompt=[5, 6], rid="grammar", sampling=grammar("json_schema", schema)),
        GenerateRequest(prompt=[5, 6], rid="regex", sampling=grammar("regex", "[ab]{5}")),
        GenerateRequest(prompt=[5, 6], rid="plain", sampling=params),
    ]
    found = two.run(requests)
    assert isinstance(json.loads(found[0].text)["a"], bool)
    assert len(found[1].text) == 5
    assert set(found[1].text) <= {"a", "b"}
    assert len(found[2].token_ids) > 0


@pytest.mark.full
def test_what_fails_after_the_pass_fails_alone(two: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are through with the batch, and go on."""
    sampler = two.built.runner.ctx.sampler
    sample = sampler.sample

    def fails(logits: Any, batch: Any) -> Any:
        if bool((batch.temperatures == 0.5).any()):
            raise ValueError("of no use")
        return sample(logits, batch)

    monkeypatch.setattr(sampler, "sample", fails)
    requests = asked()
    bad = GenerateRequest(prompt=[7, 8, 9], rid="bad", sampling=SamplingParams(temperature=0.5, max_new_tokens=4))
    *good, failed = two.run([*requests, bad])
    monkeypatch.undo()
    assert failed.finish_reason["type"] == "abort"
    assert "of no use" in failed.finish_reason["message"]
    again = two.run(asked())
    assert [answer.finish_reason["type"] for answer in good] == ["length"] * len(good)
    assert [len(answer.token_ids) for answer in again] == [LENGTH] * len(again)


@pytest.mark.full
def test_a_pass_that_fails_ends_all_ranks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = in_threads(config(model), 2, timeout=1.0)
    with Engine(resolved) as engine:
        network = engine.built.runner.ctx.network
        monkeypatch.setattr(network, "forward", lambda batch: 1 / 0)
        with pytest.raises(DeviceFailed):
            engine.run(asked())
        assert not engine.built.scheduler.components.executor.healthy()
        with pytest.raises(DeviceFailed):
            engine.run(asked())


@pytest.mark.full
def test_another_rank_that_raises_ends_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(in_threads(config(model), 2)) as engine:
        run, seen = FollowingModel.run, []

        def breaks(self: FollowingModel, work: ModelWorkerBatch) -> None:
            seen.append(work.bid)
            if len(seen) == 3:
                raise ValueError("worn out")
            run(self, work)

        monkeypatch.setattr(FollowingModel, "run", breaks)
        with pytest.raises(DeviceFailed) as caught:
            engine.run(asked())
        assert caught.value.__cause__ is not None
        with pytest.raises(GroupLost, match=r"rank 1 \(process \d+\) failed: ValueError: worn out"):
            engine.built.scheduler.components.executor.ask("nothing", None, TableChanges(SOME, SOME.astype(np.int32)))


@pytest.mark.full
def test_a_rank_that_cannot_start_fails_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: FollowingModel, num_pages: int) -> None:
        raise OutOfMemory(f"{num_pages} pages are too many")

    monkeypatch.setattr(FollowingModel, "start", full)
    with pytest.raises(GroupLost, match=r"rank 1 \(process \d+\) failed: OutOfMemory: 2048 pages are too many"):
        Engine(in_threads(config(model), 2))


def test_memory_is_what_all_ranks_have_room_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them counts, once it has its weights, and the least is what all get."""
    load, room, order = FollowingModel.load, FollowingModel.room, []

    def slowly(self: FollowingModel) -> None:
        time.sleep(0.5)
        load(self)
        order.append("load")

    def counted(self: FollowingModel, sharing: int) -> int:
        order.append(f"room of 1/{sharing}")
        assert room(self, sharing) == 2048 // PAGE
        return 100

    def own(*given: Any) -> int:
        order.append("rank 0")
        return pages_for(*given)

    monkeypatch.setattr(FollowingModel, "load", slowly)
    monkeypatch.setattr(FollowingModel, "room", counted)
    monkeypatch.setattr(build, "pages_for", own)
    with Engine(in_threads(config(model), 2)) as engine:
        assert engine.built.scheduler.components.memory.allocator.total_tokens == 100 * PAGE
        assert order == ["load", "room of 1/2", "rank 0"]
        assert len(engine.run(asked(PROMPTS[:1]))[0].token_ids) == LENGTH


@pytest.mark.parametrize("name", ["weights", "versions", "providers"])
def test_a_rank_that_differs_is_refused(model: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it reads weights."""
    monkeypatch.setattr(following, "facts", lambda chosen: {**facts(chosen), name: "of another kind"})
    monkeypatch.setattr(FollowingModel, "load", lambda self: pytest.fail("weights are read"))
    with pytest.raises(GroupLost, match=rf"rank 1 \(process \d+\) differs from rank 0 in {name}: of another kind, and"):
        Engine(in_threads(config(model), 2))


def test_plugins_that_differ_are_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved, found = in_threads(config(model), 2), registry()
    fewer = [name for name in found.lock.names if name != "logits_custom"]
    monkeypatch.setattr("tests.parallel.rank_threads.registry", lambda: found.restricted(fewer))
    with pytest.raises(GroupLost, match=r"rank 1 \(process \d+\) failed: .*logits_custom"):
        Engine(resolved)


@pytest.mark.parametrize(
    ("more", "tensor", "said"),
    [
        ({"model": {"use": "transformers"}}, 2, "it computes on one rank, and parallel.tensor is 2"),
        ({"speculation": {"use": "ngram"}}, 2, "brings tokens ahead, which does not work on 2 ranks"),
        (
            {"scheduler": {"split_prefill_layers": 1, "mixed_chunk": False}},
            2,
            "splits prefills, which does not work on 2 ranks",
        ),
        ({"prefix_cache": {"use": "hiradix"}}, 2, "the prefix cache 'hiradix' keeps KV beyond the device"),
        (
            {"scheduler": {"watchdog_timeout": 100}},
            2,
            "60 s is more than half of scheduler.watchdog_timeout, 100 s",
        ),
        ({}, 3, "do not divide by 3; tensor may be 1, 2 or 4"),
        ({"gates": [{"use": "disagg", "role": "decode"}], "kv_transfer": {"use": "tcp"}}, 2, "the gate 'disagg'"),
    ],
    ids=["transformers", "speculation", "split", "tiers", "watchdog", "sizes", "disagg"],
)
def test_what_does_not_work_is_refused(model: Path, more: dict[str, Any], tensor: int, said: str) -> None:
    """Before weights are read, and before any rank is started."""
    whole = config(model)
    whole |= {name: {**whole.get(name, {}), **part} if isinstance(part, dict) else part for name, part in more.items()}
    with pytest.raises((ConfigError, ModelError)) as caught:
        Engine(in_threads(whole, tensor))
    assert said in str(caught.value)


def test_experts_are_shared(checkpoints: Path, reference_dir: Path) -> None:
    """Each rank has some rows and columns of each expert."""
    directory = tiny_checkpoint(checkpoints, "qwen3_moe", num_hidden_layers=2)
    with Engine(in_threads(config(directory), 2)) as engine:
        answers, comparison = engine.run(asked()), Comparison()
        whole = engine.built.runner.ctx.network
        assert isinstance(whole, DenseNetwork)
        (experts, *_) = [one for one in whole.modules() if isinstance(one, MixtureOfExperts)]
        assert experts.gate_up.weight.shape[1] == experts.spec.intermediate_size, "half of the rows of gate and up"
    reference = Reference(directory, reference_dir)
    for answer, expected in zip(answers, reference.answers(PROMPTS, LENGTH), strict=True):
        comparison.add(answer.token_ids, expected, answer.rid)
    comparison.finish()


def test_too_few_cores(model: Path) -> None:
    resolved = compose(data=config(model, runner={"use": "layered"}, parallel={"tensor": 2, "cores": 1}), env={})
    with pytest.raises(ConfigError, match="2 ranks take a core each, and there are 1"):
        Engine(resolved)
