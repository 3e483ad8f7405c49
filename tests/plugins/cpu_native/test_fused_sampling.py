"""Sampling within the forward pass: the tokens that the plugin's own sampler draws from logits of the same pass, and
only where that sampler is the chosen one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.model_runner import ModelRunnerContract
from pegboard.conformance.model_runner.fakes import Rig, ScriptedProcessor
from pegboard.core.engine.engine import Engine
from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.forward import EmbedOverlay, LogprobOutput
from pegboard.core.interfaces.sampler import NO_TOKEN, Sampler, SamplerContext
from pegboard.core.interfaces.sampling import LogprobRequest, SamplingBatch, SamplingParams
from pegboard.plugins.cpu_native.options import CpuNativeSamplerOptions
from pegboard.plugins.cpu_native.sampler import CpuNativeSampler
from pegboard.plugins.sampler_torch.sampler import TorchSampler
from pegboard.toolkit.grammars.grammar import grammar_of
from tests.plugins.cpu_native.instruction_sets import EACH


class Native(ModelRunnerContract):
    """The suite's model and memory; its tests run elsewhere."""

    __test__ = False
    provider = "cpu_native"
    dtype = "bfloat16"


class CountingSampler(CpuNativeSampler):
    """Its own sampler, with a count of how often it is asked."""

    def __init__(self, vocab: int) -> None:
        super().__init__(CpuNativeSamplerOptions(), SamplerContext(vocab, torch.device("cpu")))
        self.calls = 0

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        self.calls += 1
        return super().sample(logits, batch)


class OtherSampler(Sampler):
    """Somebody else's, which draws the same: a runner may not know that."""

    def __init__(self, vocab: int) -> None:
        self._inner = CountingSampler(vocab)
        super().__init__(self._inner.options, self._inner.ctx)

    @property
    def calls(self) -> int:
        return self._inner.calls

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return self._inner.sample(logits, batch)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> LogprobOutput:
        return self._inner.logprobs(logits, tokens, batch)


PROMPTS = [
    np.random.default_rng(seed).integers(0, 200, size=length).tolist() for seed, length in enumerate((9, 1, 17, 5))
]
SAMPLED = [0, 1, 2, 3, 3, 2, 1, 0, 0, 1, 2, 3]
"""The requests of the sampled rows of a prefill: each of them some times over."""
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "sampled": [{"temperature": 1.0}],
    "mixed": [
        *({}, {"temperature": 1.3}, {"temperature": 1.0, "top_k": 1}, {"temperature": 0.8, "top_p": 0.9}),
        *({"temperature": 1.0, "top_k": 7, "min_p": 0.05}, {"top_k": 3}, {"temperature": 3.0, "top_p": 0.99}),
    ],
}


def rows_of(kind: str, count: int = len(SAMPLED), step: int = 0) -> list[dict[str, Any]]:
    cases = KINDS[kind]
    return [{**cases[(index + 2 * step) % len(cases)], "seed": index, "step": step} for index in range(count)]


@pytest.fixture(params=EACH)
def suite(request: pytest.FixtureRequest) -> Native:
    class OfSet(Native):
        __test__ = False
        options = {"instructions": request.param, "threads": 2}

    return OfSet()


def both(suite: Native, **settings: Any) -> tuple[Rig, CountingSampler, Rig, OtherSampler]:
    vocab = suite.make_model().spec.vocab_size
    own, other = CountingSampler(vocab), OtherSampler(vocab)
    return suite.rig(sampler=own, **settings), own, suite.rig(sampler=other, **settings), other


@pytest.mark.parametrize("kind", KINDS)
def test_fused_and_not_fused_draw_the_same(suite: Native, kind: str) -> None:
    """A prefill, then decodes."""
    fused, own, apart, other = both(suite)
    tokens: list[Sequence[int]] = list(PROMPTS)
    for step in range(4):
        rows = rows_of(kind, len(PROMPTS) if step else len(SAMPLED), step)
        sampled = None if step else SAMPLED
        found = [
            rig.step(dict(enumerate(tokens)), rows, sampled=sampled, decode=step > 0).next_token_ids
            for rig in (fused, apart)
        ]
        assert found[0].dtype == torch.int64
        assert found[0].tolist() == found[1].tolist(), f"step {step}"
        tokens = [[token] for token in found[0].tolist()[: len(PROMPTS)]]
    assert own.calls == 0, "the pass did not sample"
    assert other.calls == 4, "another sampler was not asked"


def test_masks(suite: Native) -> None:
    """Of greedy and of sampled rows, in any order; a mask that allows what is unlikely, or one token alone."""
    fused, own, apart, _ = both(suite)
    vocab = suite.make_model().spec.vocab_size
    allowed = {5: [3], 0: [1, 31, 32, vocab - 1], 2: list(range(0, vocab, 7)), 7: [vocab - 1, 2], 4: list(range(vocab))}
    found = [
        rig.step(dict(enumerate(PROMPTS)), rows_of("mixed"), sampled=SAMPLED, allowed=allowed).next_token_ids.tolist()
        for rig in (fused, apart)
    ]
    assert found[0] == found[1]
    assert all(found[0][row] in few for row, few in allowed.items())
    assert own.calls == 0


def test_some_rows_are_sampled(suite: Native) -> None:
    fused, _, apart, _ = both(suite)
    found = [
        rig.step(dict(enumerate(PROMPTS)), rows_of("mixed", 2), sampled=[3, 1]).next_token_ids.tolist()
        for rig in (fused, apart)
    ]
    assert len(found[0]) == 2
    assert found[0] == found[1]


def test_the_sampler_is_asked_where_somebody_looks_at_the_logits(suite: Native) -> None:
    """Logits, logprobs and processors; and the pass samples again afterwards."""
    log: list[tuple[str, Any]] = []
    fused, own, _, _ = both(suite, processors=[ScriptedProcessor("negate", log, torch.neg_)])
    new = dict(enumerate(PROMPTS))
    fused.step(new, rows_of("mixed", 4), return_logits=True)
    assert own.calls == 1
    output = fused.step({0: [1]}, rows_of("mixed")[1:2], decode=True, logprobs=[LogprobRequest(top=2)])
    assert output.logprobs is not None
    assert own.calls == 2
    fused.step({0: [1]}, rows_of("mixed")[1:2], decode=True, processed=True)
    assert own.calls == 3
    assert [name for name, _ in log] == ["prepare negate", "apply negate"]
    fused.step({0: [1]}, rows_of("mixed")[1:2], decode=True)
    assert own.calls == 3


@pytest.mark.parametrize("row", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}], ids=str)
def test_logits_that_are_no_numbers(row: dict[str, Any]) -> None:
    """What overflows is told, in greedy rows too, and the others get their tokens."""
    suite = Native()
    rig = suite.rig(sampler=CountingSampler(suite.make_model().spec.vocab_size))
    batch, sampling = rig._prepare(dict(enumerate(PROMPTS[:3])), [{**row, "seed": 1}] * 3, None, False, (), False)
    hidden = suite.make_model().spec.hidden_size
    rows = torch.arange(len(PROMPTS[0]), batch.num_tokens)
    batch.overlay = EmbedOverlay(rows, torch.full((len(rows), hidden), torch.nan))
    tokens = rig.runner.execute(batch, sampling).next_token_ids.tolist()
    assert tokens[0] >= 0
    assert tokens[1:] == [NO_TOKEN, NO_TOKEN]


class TestEngine:
    """With the scheduler, its steps and its seeds around it."""

    @pytest.fixture
    def checkpoint(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama")

    def answers(self, checkpoint: Path, **more: Any) -> tuple[list[list[int]], str]:
        base: dict[str, Any] = {
            "model": {"path": str(checkpoint), "dtype": "bfloat16", "device": "cpu"},
            "memory": {"max_total_tokens": 1024},
            "log_level": "error",
        }
        shared = {"max_new_tokens": 12, "ignore_eos": True}
        params = [
            SamplingParams(temperature=0.0, **shared),  # type: ignore[arg-type]
            SamplingParams(temperature=1.0, seed=7, **shared),  # type: ignore[arg-type]
            SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=8, **shared),  # type: ignore[arg-type]
            SamplingParams(temperature=1.5, min_p=0.1, seed=9, **shared),  # type: ignore[arg-type]
            SamplingParams(temperature=1.0, seed=10, max_new_tokens=12, grammar=grammar_of(regex="[a-z]{3,8}")),
        ]
        with Engine.from_config({**base, **more}) as engine:
            requests = [GenerateRequest(prompt=PROMPTS[0], sampling=one) for one in params]
            return [list(one.token_ids) for one in engine.run(requests)], engine.info.providers["sampler"][0]

    def test_the_same_answers_with_the_torch_sampler_and_with_overlap(
        self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And each is the one that the config names. `auto` is its own."""
        asked = []
        original = TorchSampler.sample

        def spy(self: TorchSampler, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
            asked.append(len(logits))
            return original(self, logits, batch)

        monkeypatch.setattr(TorchSampler, "sample", spy)
        answers, name = self.answers(checkpoint)
        assert name == "cpu_native"
        assert not asked
        assert self.answers(checkpoint, scheduler={"loop": "overlap"}) == (answers, "cpu_native")
        assert not asked
        assert self.answers(checkpoint, sampler={"use": "torch"}) == (answers, "torch")
        assert asked, "the sampler that was named did not sample"
