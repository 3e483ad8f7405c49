"""Who raised in a step is told by name: in the answer, in the log and in the figures."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.core.config.compose import compose
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.logits_processor import LogitsProcessor
from pegboard.core.interfaces.plugin import Plugin, Provider
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.registry.registry import Registry
from pegboard.plugins.sampler_torch.sampler import TorchSampler
from tests.core.pipeline.harness import Harness, oracle

GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
WARM = SamplingParams(temperature=0.5, max_new_tokens=6, ignore_eos=True, seed=3)
FIRST, SECOND = [3, 4, 5], [6, 7, 8]
VOCAB = 512


class Odd(TorchSampler):
    """Answers with what `spoil` makes of the tokens."""

    spoil: Callable[[Any, Any], Any] = staticmethod(lambda tokens, batch: tokens)

    def sample(self, logits: torch.Tensor, batch: Any) -> Any:
        return type(self).spoil(super().sample(logits, batch), batch)


class Moody(LogitsProcessor):
    """Raises for requests that are warm: at once for a seed of 13, otherwise in the step."""

    reads_output = False

    def wants(self, params: SamplingParams) -> bool:
        if params.seed == 13:
            raise KeyError("unlucky")
        return params.temperature > 0

    def prepare(self, rows: Any) -> Any:
        return [row.params.temperature > 0 for row in rows]

    def apply(self, logits: torch.Tensor, state: Any) -> None:
        if any(state):
            self._deeper()

    error: Exception = KeyError("too warm")

    def _deeper(self) -> None:
        raise self.error


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama", num_hidden_layers=1)


@pytest.fixture(scope="module", params=["normal", "overlap"])
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    sys.modules.setdefault("pegboard_test_culprits", sys.modules[__name__])
    plugin = Plugin(
        "acme",
        "1.0",
        (
            Provider("sampler", "odd", "pegboard_test_culprits:Odd", "", provides=frozenset({"seeded"})),
            Provider("logits_processor", "moody", "pegboard_test_culprits:Moody", ""),
        ),
    )
    config = {
        "attention": {"use": "torch"},
        "sampler": {"use": "odd"},
        "logits_processors": ["penalties", "moody"],
        "memory": {"max_total_tokens": 1024},
        "model": {"path": str(checkpoint), "dtype": "float32"},
        "scheduler": {"loop": request.param},
    }
    registry = Registry.discover().with_plugins(plugin, distribution="acme-bits", version="2.1")
    with Engine(compose(data=config, env={}, registry=registry)) as engine:
        yield engine


def run(engine: Engine, *sampling: SamplingParams) -> list[Any]:
    """Answers to FIRST and SECOND; the engine must be as good as new afterwards."""
    requests = [GenerateRequest(prompt=p, sampling=s) for p, s in zip((FIRST, SECOND), sampling, strict=True)]
    outputs = engine.run(requests)
    assert engine.built.scheduler.idle
    assert engine.built.scheduler.components.memory.idle_error() is None
    return outputs


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tokens, batch: tokens + 100_000, r"the sampled token 10\d+ of row 0 is none of the vocabulary's"),
        (lambda tokens, batch: tokens * 0 - 3, r"the sampled token -3 of row 0 is none of the vocabulary's"),
        (lambda tokens, batch: tokens.int(), r"must be int64 \[\d\] on cpu, and not int32 \[\d\] on cpu"),
        (lambda tokens, batch: tokens[:0], r"must be int64 \[\d\] on cpu, and not int64 \[0\] on cpu"),
        (lambda tokens, batch: tokens[:, None], r"must be int64 \[\d\] on cpu, and not int64 \[\d, 1\] on cpu"),
        (lambda tokens, batch: tokens.tolist(), "must be a tensor, and not a list"),
    ],
)
def test_what_are_no_tokens_is_the_samplers_fault_in_that_step(
    engine: Engine, spoil: Any, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = [one.token_ids for one in run(engine, GREEDY, GREEDY)]
    before = engine.stats()
    with monkeypatch.context() as patch:
        patch.setattr(Odd, "spoil", staticmethod(spoil))
        outputs = run(engine, GREEDY, GREEDY)
    who = r"the sampler 'odd' \(acme-bits 2.1\) failed: BadTokens: .*"
    for output in outputs:
        assert output.token_ids == []
        assert (output.finish_reason["type"], output.finish_reason["status"]) == ("abort", 500)
        assert re.match(who + message, output.finish_reason["message"]), output.finish_reason["message"]
    assert "the sampler 'odd' (acme-bits 2.1) failed" in caplog.text
    after = engine.stats()
    failed = after["failed_batches"] - before["failed_batches"]
    assert failed >= 1
    was = before["plugin_failures_by"].get("sampler", {}).get("odd", 0)
    assert after["plugin_failures_by"]["sampler"]["odd"] - was == failed
    assert after["plugin_failures"] - before["plugin_failures"] == failed
    assert [one.token_ids for one in run(engine, GREEDY, GREEDY)] == alone, "nothing is left of it"


def test_a_bad_id_of_one_row_costs_the_others_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = run(engine, GREEDY, GREEDY)[0].token_ids
    cool = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True, top_p=0.5)

    def spoil(tokens: torch.Tensor, batch: Any) -> torch.Tensor:
        return torch.where((batch.top_ps < 1) & (batch.steps >= 2), VOCAB * 1000, tokens)

    monkeypatch.setattr(Odd, "spoil", staticmethod(spoil))
    good, bad = run(engine, GREEDY, cool)
    assert good.token_ids == alone
    assert len(bad.token_ids) == 2
    assert "the sampler 'odd'" in bad.finish_reason["message"]


def test_a_processor_that_raises_is_told_by_name_and_place(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    alone = run(engine, GREEDY, GREEDY)[0].token_ids
    before = engine.stats()["plugin_failures_by"].get("logits_processor", {}).get("moody", 0)
    good, bad = run(engine, GREEDY, WARM)
    assert good.token_ids == alone
    line = Moody._deeper.__code__.co_firstlineno + 1
    told = "the logits processor 'moody' (acme-bits 2.1) failed: KeyError: 'too warm'"
    assert bad.finish_reason["message"] == told, "a client does not hear of the server's files"
    assert f"{told} ({__file__}:{line})" in caplog.text
    assert engine.stats()["plugin_failures_by"]["logits_processor"]["moody"] == before + 1


class Mute(Exception):
    """Cannot say what is wrong."""

    def __str__(self) -> str:
        raise AttributeError("message")


def test_an_error_whose_text_raises_ends_its_request_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Moody, "error", Mute())
    good, bad = run(engine, GREEDY, WARM)
    assert len(good.token_ids) == 6
    told = "the logits processor 'moody' (acme-bits 2.1) failed: Mute: (its text cannot be told: AttributeError)"
    assert bad.finish_reason["message"] == told
    assert f"{told} ({__file__}:" in caplog.text


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_rows_without_a_finite_logit_are_not_the_samplers_fault(
    engine: Engine, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor's, where it leaves nothing of other logits either; the model's otherwise."""
    before, failed = engine.stats()["plugin_failures_by"], engine.stats()["failed_batches"]

    def ruin(self: Moody, logits: torch.Tensor, state: Any) -> None:
        logits[torch.tensor(state)] = value

    with monkeypatch.context() as patch:
        patch.setattr(Moody, "apply", ruin)
        good, bad = run(engine, GREEDY, WARM)
    assert len(good.token_ids) == 6
    told = "failed: nothing can be sampled: its logits hold NaN, or nothing finite"
    assert bad.finish_reason["message"] == f"the logits processor 'moody' (acme-bits 2.1) {told}"
    assert bad.finish_reason["code"] == "not_sampleable"
    assert engine.stats()["failed_batches"] == failed, "no batch is run again for it"

    runner: Any = engine.built.runner
    network = runner._network
    logits_of = network.logits
    with monkeypatch.context() as patch:
        patch.setattr(network, "logits", lambda hidden: logits_of(hidden) * math.nan + value)
        outputs = run(engine, GREEDY, GREEDY)
    assert [output.finish_reason["message"] for output in outputs] == [f"the model {told}"] * 2
    after = engine.stats()["plugin_failures_by"]
    assert after.get("sampler") == before.get("sampler")
    assert after["logits_processor"]["moody"] > before.get("logits_processor", {}).get("moody", 0)


def test_a_runner_that_samples_itself_answers_for_its_tokens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(hidden: torch.Tensor, sampling: Any, output: Any, return_logits: bool) -> None:
        output.next_token_ids = torch.full((hidden.shape[0],), VOCAB + 7)

    monkeypatch.setattr(engine.built.runner, "_sample", fused)
    for output in run(engine, GREEDY, GREEDY):
        assert output.finish_reason["message"].startswith("the runner 'layered' (pegboard ")


def test_a_processor_that_raises_on_parameters_is_told_by_name(engine: Engine) -> None:
    before = engine.stats()["plugin_failures_by"].get("logits_processor", {}).get("moody", 0)
    with pytest.raises(InvalidRequest, match=r"the logits processor 'moody' \(acme-bits 2.1\) failed: KeyError: 'unl"):
        engine.generate([FIRST], SamplingParams(seed=13))
    assert engine.stats()["plugin_failures_by"]["logits_processor"]["moody"] == before + 1


def test_a_cache_that_always_raises_is_logged_once_in_a_thousand(caplog: pytest.LogCaptureFixture) -> None:
    def boom(*_: object) -> None:
        raise RuntimeError("boom")

    harness = Harness()
    harness.memory.cache.match = boom  # type: ignore[method-assign,assignment]
    for i in range(5):
        harness.submit(f"r{i}", [i, 1, 2], 1)
    harness.run()
    assert all(harness.tokens(f"r{i}") == oracle([i, 1, 2], 1) for i in range(5))
    for _ in range(1995):
        harness.memory.guarded.failed("match", "; all of it is computed")
    told = [one.getMessage() for one in caplog.records if "the prefix cache" in one.getMessage()]
    assert [re.findall(r"\d+ times", one) for one in told] == [["1 times"], ["1000 times"], ["2000 times"]]
    harness.memory.guarded.failed("evict")
    assert "evict (1 times so far)" in caplog.text, "another call has a line of its own"
    assert harness.scheduler.info()["plugin_failures_by"] == {"prefix_cache": {harness.memory.guarded.name: 2001}}
