"""A step takes one copy to the device and one back, and the host looks at nothing in between.

The device is `meta`, whose tensors have no data. Kernels are noted, and do not run. Each step is one of a whole engine:
only its worker, with model, memory, processors and sampler, is replaced by a twin on that device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.rig.no_looks import LookedAtData, NoLooks, watched
from pegboard.core.engine.build import BuiltScheduler
from pegboard.core.engine.engine import Engine, GenerateOutput
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.batch import ModelWorkerBatch
from pegboard.core.interfaces.forward import ForwardBatch, ForwardMode
from pegboard.core.interfaces.graphs import Replay
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampler import SamplerContext
from pegboard.core.interfaces.sampling import Grammar, SamplingParams
from pegboard.core.pipeline.executor import LocalExecutor
from pegboard.core.worker.worker import PendingResult, Worker
from pegboard.plugins.attn_triton.backend import TritonAttention
from pegboard.plugins.attn_triton.options import TritonAttentionOptions
from pegboard.plugins.memory_paged.pool import MHAPool
from pegboard.plugins.runner_layered.options import LayeredOptions
from pegboard.plugins.runner_layered.runner import LayeredRunner
from pegboard.plugins.sampler_triton.options import TritonSamplerOptions
from pegboard.plugins.sampler_triton.sampler import TritonSampler
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.kernels import allowed
from pegboard.toolkit.kernels.launch import Launch, observed
from tests.fakes.device_queue import RecordingQueue

T = TypeVar("T")

META = torch.device("meta")
SIZES = (1, 2, 4)
PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10] * 11]


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True, **more})


KINDS: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "greedy": (params(), {}),
    "top_p": (params(temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, seed=4), {}),
    "penalties": (params(frequency_penalty=0.5, repetition_penalty=1.1), {}),
    "grammar": (params(grammar=Grammar("regex", "a{1,40}")), {}),
    "logprobs": (params(), {"logprobs": 3, "token_ids_logprob": (5, 6)}),
    "hidden": (params(), {"return_hidden_states": True}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints"), "llama", num_hidden_layers=2)


class Recorded:
    """Graphs of a device that computes nothing: they are recorded, and a replay is noted."""

    def __init__(self) -> None:
        self.replays = 0

    def warm(self, run: Callable[[], T]) -> T:
        return run()

    def capture(self, run: Callable[[], T]) -> tuple[Replay, T]:
        return self._replay, run()

    def memory(self) -> int:
        return 0

    def _replay(self) -> None:
        self.replays += 1


class Audit:
    """An engine whose steps run on the device without data. `steps` has for each its mode, and how many copies there
    were: to the device with the step, to the device for plugins, and back.
    """

    def __init__(
        self,
        checkpoint: Path,
        loop: str,
        *,
        graphs: bool = False,
        attention: type[TritonAttention] = TritonAttention,
        **scheduler: Any,
    ) -> None:
        self.engine = Engine.from_config(
            {
                "attention": {"use": "torch"},
                "runner": {"use": "layered"},
                "memory": {"max_total_tokens": 2048, "page_size": 4},
                "model": {"path": str(checkpoint), "dtype": "float32", "hidden_states": True},
                "scheduler": {"loop": loop, **scheduler},
            }
        )
        built = self.engine.built
        components = built.scheduler.components
        token = built.tokenizer.encode("a")[-1]
        self.queue = RecordingQueue(token)
        self.launches: list[Launch] = []
        self.steps: list[tuple[ForwardMode, int, int, int]] = []
        components.memory.rows.mirrored = True
        self.capture = Recorded() if graphs else None
        self.worker = self._twin(built, components.memory.rows, attention)
        run = watched(self._launch, META)
        components.executor.close()
        components.executor = LocalExecutor(run, thread=loop == "overlap")

    def _twin(self, built: BuiltScheduler, rows: ReqToTokenPool, kind: type[TritonAttention]) -> Worker:
        ctx, page = built.runner.ctx, built.pool.page_size
        layers = ctx.spec.layers
        pool = MHAPool(NoOptions(), KVPoolContext(64, page, layers, torch.float32, META))
        attention = kind(
            TritonAttentionOptions(),
            AttentionContext(layers, page, torch.float32, META, 64, 256, graph_sizes=SIZES, bring=self.queue.bring),
        )
        processors = []
        for one in ctx.processors:
            twin = copy.copy(one)
            twin.ctx = replace(one.ctx, device=META, bring=self.queue.bring)
            processors.append(twin)
        network: Any = copy.deepcopy(ctx.network)
        about = replace(
            ctx,
            network=network.to(META),
            attention=attention,
            sampler=TritonSampler(TritonSamplerOptions(), SamplerContext(ctx.spec.vocab_size, META)),
            processors=tuple(processors),
            device=META,
            provides={"attention": frozenset({"graph", "graph_extend"}), "model_family": frozenset({"graph"})},
            capture=self.capture,
            graph_sizes=SIZES,
        )
        options = LayeredOptions(graphs="on" if self.capture else "off", prefill_graph_sizes=[8, 32])
        self.runner = LayeredRunner(options, about)
        worker = Worker(self.runner, attention, pool, rows, self.queue, parts=[*built.worker.parts.by_name.values()])
        with NoLooks(META), allowed("meta"), observed(lambda launch: False):
            self.runner.start(pool, worker.batches.table)
        return worker

    def _launch(self, work: ModelWorkerBatch) -> PendingResult:
        def note(launch: Launch) -> bool:
            self.launches.append(launch)
            return False

        before = self._counts()
        with allowed("meta"), observed(note):
            pending = self.worker.launch(work)
        there, plugins, back = (new - old for new, old in zip(self._counts(), before, strict=True))
        self.steps.append((work.forward_mode, there, plugins, back))
        return pending

    def _counts(self) -> tuple[int, int, int]:
        return len(self.queue.sent), self.queue.brought, self.queue.fetched

    def run(self, kind: str) -> list[GenerateOutput]:
        sampling, more = KINDS[kind]
        return self.engine.generate(PROMPTS, sampling, **more)


@pytest.fixture(scope="module", params=["normal, eager", "normal, graph", "overlap, eager", "overlap, graph"])
def audit(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Audit]:
    loop, way = request.param.split(", ")
    made = Audit(checkpoint, loop, graphs=way == "graph")
    with made.engine:
        yield made


def check(audit: Audit, kind: str) -> None:
    """Run requests of a kind, and fail unless each step has had one copy there, one back, and no others."""
    audit.steps.clear()
    before = 0 if audit.capture is None else audit.capture.replays
    outputs = audit.run(kind)
    stats = audit.engine.stats()
    assert stats["failed_batches"] == stats["plugin_failures"] == 0
    assert [len(output.token_ids) for output in outputs] == [8, 8, 8]
    modes = [mode for mode, _, _, _ in audit.steps]
    decodes = modes.count(ForwardMode.DECODE)
    assert decodes >= 6
    assert decodes < len(modes), "no step has had a prompt"
    if audit.capture is not None:
        # Graphs of decodes do not show hidden states, those of prefills do.
        prefills = len(modes) - decodes
        assert audit.capture.replays - before == prefills + (0 if kind == "hidden" else decodes)
    assert {(there, back) for _, there, _, back in audit.steps} == {(1, 1)}
    # A processor brings its arrays in one copy, or none. Attention brings nothing.
    assert max(plugins for _, _, plugins, _ in audit.steps) == (1 if kind == "penalties" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_one_copy_there_and_one_back(audit: Audit, kind: str) -> None:
    check(audit, kind)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_chunks_of_prompts_in_the_decodes_batch(checkpoint: Path, loop: str, graphs: bool) -> None:
    made = Audit(checkpoint, loop, graphs=graphs, mixed_chunk=True, chunked_prefill_size=8)
    with made.engine:
        check(made, "greedy")
    assert [mode for mode, _, _, _ in made.steps].count(ForwardMode.MIXED) >= 1
    names = [getattr(one.kernel, "__name__", "") for one in made.launches]
    assert {"tiles_kernel", "singles_kernel"} <= set(names)


class BringsByItself(TritonAttention):
    """Has its lists made on the host, in a copy of their own."""

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        if batch.extend_lens_cpu is not None:
            self.ctx.on_device(batch.extend_lens_cpu)


class GoesPastTheQueue(TritonAttention):
    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        torch.from_numpy(batch.seq_lens_cpu).to(META)


@pytest.mark.parametrize("mutant", [BringsByItself, GoesPastTheQueue])
def test_attention_with_a_copy_of_its_own_is_found(checkpoint: Path, mutant: type[TritonAttention]) -> None:
    made = Audit(checkpoint, "normal", attention=mutant)
    with made.engine, pytest.raises((AssertionError, RuntimeError)):
        check(made, "greedy")


LOOKS: dict[str, Callable[[torch.Tensor], object]] = {
    "a number": lambda one: one.sum().item(),
    "a truth": lambda one: bool((one > 0).any()),
    "places": lambda one: one.nonzero(),
    "a mask": lambda one: one[one > 0],
    "a copy there": lambda one: one + torch.zeros(3).to(META),
    "a copy back": lambda one: one.cpu(),
    "a copy like another": lambda one: torch.zeros(3).to(one),
    "places by where": lambda one: torch.where(one > 0),
    "places by argwhere": lambda one: torch.argwhere(one),
    "numbers through a mask": lambda one: one.index_put_((one > 0,), one),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_the_mode_sees_looks(look: Callable[[torch.Tensor], object], inference: bool) -> None:
    with torch.inference_mode(inference), NoLooks(META):
        one = torch.zeros(3, device=META) + 1
        one[one > 0] = 3.0
        assert torch.ones(2).to(torch.device("cpu")).sum().item() == 2
        with pytest.raises((LookedAtData, RuntimeError, NotImplementedError)):
            look(one)
