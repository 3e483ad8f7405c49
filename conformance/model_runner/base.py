"""What all tests of model runners start from: a tiny model, a runner over its own memory, and transformers' answers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from pegboard.conformance.model_runner.fakes import CPU, Rig, WatchedNetwork
from pegboard.conformance.rig.model_references import model_checkpoint, read_config, transformers_model
from pegboard.conformance.rig.paged import PagedRun
from pegboard.conformance.subject import installed_registry
from pegboard.conformance.suite import ContractSuite
from pegboard.core.interfaces.forward import ForwardOutput
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.logits_processor import LogitsProcessor
from pegboard.core.interfaces.model_family import ModelContext, Network
from pegboard.core.interfaces.model_runner import ModelRunnerContext
from pegboard.core.interfaces.sampler import Sampler, SamplerContext
from pegboard.toolkit.model.kv_groups import SERVICE
from pegboard.toolkit.model.ranks import SERVICE as RANKS
from pegboard.toolkit.model.ranks import Ranks


@dataclass(frozen=True)
class RunnerModel:
    """The model that a runner is tested with: a checkpoint on disk, and the network that a model family made of it."""

    model: ModelContext
    spec: ModelSpec
    network: Network


class RunnerSuite(ContractSuite):
    """Builds the runner under test, and compares what it answers."""

    contract = "runner"

    architecture: ClassVar[str] = "llama"
    """A name that `rig.model_references.model_checkpoint` takes."""

    checkpoint_settings: ClassVar[Mapping[str, Any]] = {}
    """Fields of the architecture's config: larger heads, say, for a runner that needs them."""

    tower: ClassVar[str] = "qwen3_vl"
    """The architecture of the tests of positions with three axes, of one of `vl_checkpoints.VL_FAMILIES`."""

    dtype: ClassVar[str] = "float32"
    """The dtype that weights and KV are kept in."""

    tolerance: ClassVar[float] = 1e-4
    """Largest error of a logit, relative to the row's largest. `model_family.base.TOLERANCE` says why this one in
    float32; a runner that computes in bf16 needs some per cent."""

    page_size: ClassVar[int] = 4
    """Tokens per page of KV."""

    def make_model(self) -> RunnerModel:
        """Return the model to run: by default a tiny random checkpoint, in the network of the best model family
        installed.
        """
        settings = json.dumps(dict(self.checkpoint_settings), sort_keys=True)
        found = _load_model(self.architecture, settings, self.dtype)
        if isinstance(found, str):
            pytest.skip(found)
        return found

    def make_tower(self) -> RunnerModel:
        """Return the model of the tests of positions with three axes."""
        found = _load_model(self.tower, "{}", self.dtype)
        if isinstance(found, str):
            pytest.skip(found)
        return found

    def make_windowed(self) -> RunnerModel:
        """Return a model whose layers have a window of 8 tokens, and a KV group of their own."""
        found = _load_model("mistral", '{"sliding_window": 8}', self.dtype, grouped=True)
        if isinstance(found, str):
            pytest.skip(found)
        if len(found.spec.kv_groups) < 2:
            pytest.skip("the best model family installed gives layers with windows no group of their own")
        return found

    def make_shared(self, ranks: Ranks) -> RunnerModel:
        """Return the model as one of several ranks computes it, new each time."""
        found = _read_model(self.architecture, self.checkpoint_settings, self.dtype, {RANKS: ranks})
        if isinstance(found, str):
            pytest.skip(found)
        return found

    def make_context(
        self,
        run: PagedRun,
        model: RunnerModel,
        network: Network,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
    ) -> ModelRunnerContext:
        """Return the context of the runner under test."""
        return ModelRunnerContext(
            spec=model.spec,
            model=model.model,
            network=network,
            attention=run.attention,
            sampler=sampler,
            processors=tuple(processors),
            device=CPU,
        )

    def rig(
        self,
        *,
        network: Network | None = None,
        sampler: Sampler | None = None,
        processors: Sequence[LogitsProcessor] = (),
        model: RunnerModel | None = None,
    ) -> Rig:
        """Return a new runner of `make_model`, with the model's own network and the best sampler installed, unless
        others are given.
        """
        model = self.make_model() if model is None else model
        run = PagedRun(model.network, model.spec, dtype=model.model.dtype, page_size=self.page_size)
        network = model.network if network is None else network
        sampler = best_sampler(model.spec.vocab_size) if sampler is None else sampler
        return Rig(self.build(self.make_context(run, model, network, sampler, processors)), run)

    def watched(self) -> WatchedNetwork:
        return WatchedNetwork(self.make_model().network)

    @pytest.fixture
    def prompts(self) -> list[list[int]]:
        """Three prompts, none of a whole number of pages."""
        draw = torch.Generator().manual_seed(1)
        vocab = self.make_model().spec.vocab_size
        return [torch.randint(0, vocab, (length,), generator=draw).tolist() for length in (33, 18, 5)]

    def expected(self, prompt: Sequence[int]) -> torch.Tensor:
        """Return transformers' logits float32 [len, vocab] in float32."""
        return reference(self.make_model().model.directory, tuple(prompt))[0]

    def check_logits(self, found: torch.Tensor | None, expected: torch.Tensor) -> None:
        __tracebackhide__ = True
        assert found is not None, "return_logits was asked for"
        assert found.dtype == torch.float32, f"logits are {found.dtype}, not float32"
        assert found.shape == expected.shape
        assert not found.requires_grad
        error = ((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max()
        assert float(error) <= self.tolerance, f"logits are off by {float(error):.3g} relative"

    def check_tokens(self, found: torch.Tensor, expected: Sequence[int]) -> None:
        __tracebackhide__ = True
        assert found.dtype == torch.int64, f"next_token_ids are {found.dtype}, not int64"
        assert found.tolist() == list(expected)

    def check_greedy(self, output: ForwardOutput, expected: torch.Tensor) -> None:
        """Logits as expected, and tokens that are the logits' maxima: of its own, since a tie may break either way."""
        __tracebackhide__ = True
        self.check_logits(output.logits, expected)
        assert output.logits is not None
        self.check_tokens(output.next_token_ids, output.logits.argmax(-1).tolist())


@lru_cache(maxsize=1)
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return where this process keeps its checkpoints; it goes with the process."""
    return tempfile.TemporaryDirectory(prefix="pegboard-runner-")


@lru_cache(maxsize=8)
def _load_model(architecture: str, settings: str, dtype: str, *, grouped: bool = False) -> RunnerModel | str:
    """Return the model, or why there is none; if `grouped`, with KV groups for layers with windows."""
    return _read_model(architecture, json.loads(settings), dtype, {SERVICE: True} if grouped else {})


def _read_model(
    architecture: str, settings: Mapping[str, object], dtype: str, services: Mapping[str, object]
) -> RunnerModel | str:
    directory = model_checkpoint(Path(_folder().name), architecture, **settings)
    config = read_config(directory)
    ctx = ModelContext(directory, config, getattr(torch, dtype), CPU, services=services)
    reasons = []
    for record in installed_registry().providers("model_family"):
        options = record.options_model()()
        reason = record.load().supports(options, ctx)
        if reason is None:
            family = record.load()(options, ctx)
            return RunnerModel(ctx, family.spec, family.load())
        reasons.append(f"{record.name}: {reason}")
    return f"no installed model family runs {architecture}: {'; '.join(reasons) or 'none is installed'}"


def best_sampler(vocab: int) -> Sampler:
    ctx = SamplerContext(vocab, CPU)
    for record in installed_registry().providers("sampler"):
        options = record.options_model()()
        if record.load().supports(options, ctx) is None:
            sampler: Sampler = record.load()(options, ctx)
            return sampler
    pytest.skip("no installed sampler samples on a CPU")


@lru_cache(maxsize=128)
def reference(directory: Path, prompt: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [len, vocab] and last hidden states [len, hidden] of a prompt by transformers, in float32."""
    with torch.inference_mode():
        output = transformers_model(directory)(torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
        return output.logits[0].float(), output.hidden_states[-1][0].float()
