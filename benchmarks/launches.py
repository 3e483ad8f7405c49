"""How much a decode step launches: operators of torch and kernels, counted on a device without data.

    python -m benchmarks.launches [--batch 8] [--list] [--markdown FILE] [--transformers]

Whole steps of a worker run on the device "meta", with the runner `layered`, the families', attention's and sampler's
kernels as on a GPU: a step of the overlap loop, which takes its tokens from the step before and writes new slots into
the row table, over the shapes of Llama 3 8B, Qwen3 8B and Qwen3 30B-A3B. Everything that would run on a device counts,
matrix products and kernels alike; views and allocations do not, nor do the two copies of a step between host and
device. Attention is split over the KV, which takes two kernels. What a layer launches is the difference between models
of two layers and of one; the rest is outside the layers. Fails where that is more than 10 a layer, 15 with experts, or
16 outside, or more where a step samples than where it is greedy. `--transformers` counts models through the family
transformers instead, see `benchmarks.launches_transformers`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pegboard.conformance.rig.no_looks import tensors_in
from pegboard.core.interfaces.attention import AttentionContext
from pegboard.core.interfaces.batch import ModelWorkerBatch, SamplingInfo, TableChanges
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.layers import ModelSpec
from pegboard.core.interfaces.model_family import ModelContext, Network
from pegboard.core.interfaces.model_runner import ModelRunnerContext
from pegboard.core.interfaces.sampler import SamplerContext
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.pipeline.running import NUMBERS
from pegboard.core.registry.registry import Registry
from pegboard.core.worker.worker import Worker
from pegboard.plugins import attn_triton, memory_paged, runner_layered, sampler_triton
from pegboard.plugins.model_dense.network import DenseNetwork
from pegboard.toolkit import kernels
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.device_queue import Fetched, side_by_side
from pegboard.toolkit.kernels.launch import Launch, observed
from pegboard.toolkit.model.decoder_spec import DecoderSpec
from pegboard.toolkit.model.layers import Linears
from tests.fakes.device_queue import RecordingQueue

REGISTRY = Registry.of(*(one.plugin for one in (attn_triton, memory_paged, runner_layered, sampler_triton)))
META = torch.device("meta")
MOST_A_LAYER, MOST_WITH_EXPERTS, MOST_OUTSIDE = 10, 15, 16
CONTEXT = 8192

_SHAPE = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3 8B": {
        **_SHAPE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "intermediate_size": 14336,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    "Qwen3 8B": {
        **_SHAPE,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "intermediate_size": 12288,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "Qwen3 30B-A3B": {
        **_SHAPE,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
}
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.05, seed=1),
}

NOTHING = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach")
)
"""Operators beside views that launch nothing."""


class Counter(TorchDispatchMode):
    """Notes what would be launched, in order: operators by their names, and kernels by theirs."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.launched: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self:  # under inference mode what is made of other operators comes as it is: those count
            made = func.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        name = func.overloadpacket.__name__
        found = func(*args, **(kwargs or {}))
        there = any(one.device == META for one in tensors_in((args, kwargs, found)))
        if there and not func.is_view and name not in NOTHING:
            self.launched.append(name)
        return found

    def note(self, launch: Launch) -> bool:
        self.launched.append(str(getattr(launch.kernel, "__name__", launch.kernel)))
        return False


class Queue(RecordingQueue):
    """A RecordingQueue that lays results side by side, as that of a GPU does."""

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetched:
        side_by_side(tensors)
        return super().fetch(tensors)


@dataclass(frozen=True, slots=True)
class Count:
    """What a decode step launches, in each layer and outside of them."""

    model: str
    sampling: str
    layer: tuple[str, ...]
    outside: tuple[str, ...]


class Rig:
    """A worker with a model of some layers."""

    models: ClassVar[Mapping[str, Mapping[str, Any]]] = MODELS
    """Configs by name."""

    def __init__(self, model: str, layers: int, batch: int) -> None:
        config = {**self.models[model], "num_hidden_layers": layers}
        self.batch = batch
        about = ModelContext(Path(), config, torch.bfloat16, META)
        self.network, self.spec = self.built(about)
        self.rows = ReqToTokenPool(batch, CONTEXT, 16, mirrored=True)
        self.worker = self._worker(about)

    def built(self, about: ModelContext) -> tuple[Network, ModelSpec]:
        """Return a network without weights, and what it says of itself."""
        spec = DecoderSpec.from_config(about.hf_config)
        return (
            DenseNetwork(spec, Linears(about.dtype, META)),
            spec.model_spec(context_length=None, eos_token_ids=frozenset()),
        )

    def _worker(self, about: ModelContext) -> Worker:
        layers, queue = self.spec.layers, Queue()
        pool = built("kv_pool", "mha", KVPoolContext(1024, 16, layers, about.dtype, META))
        bounds = AttentionContext(layers, 16, about.dtype, META, self.batch, CONTEXT, bring=queue.bring)
        attention = built("attention", "triton", bounds, kv_parts=8)
        sampler = built("sampler", "triton", SamplerContext(self.spec.vocab_size, META))
        context = ModelRunnerContext(self.spec, about, self.network, attention, sampler, (), META)
        return Worker(built("runner", "layered", context), attention, pool, self.rows, queue)

    def step(self, sampling: SamplingParams) -> list[str]:
        """Return what the second of two decode steps launches: the sampling parameters are there since the first."""
        info = SamplingInfo(
            1,
            np.array([sampling.row(index, self.spec.vocab_size) for index in range(self.batch)], NUMBERS),
            np.zeros(self.batch, np.int64),
        )
        with kernels.allowed("meta"), torch.inference_mode():
            with observed(lambda launch: False):
                self.worker.launch(self._work(info, 100))
            counter = Counter()
            with counter, observed(counter.note):
                self.worker.launch(self._work(info, 101))
        return counter.launched

    def _work(self, info: SamplingInfo, length: int) -> ModelWorkerBatch:
        rows = np.arange(1, self.batch + 1)
        slots = rows * 16
        return ModelWorkerBatch(
            bid=length,
            forward_mode=ForwardMode.DECODE,
            input_ids=np.full(self.batch, -1),
            positions=np.full(self.batch, length - 1),
            rows=rows,
            seq_lens=np.full(self.batch, length),
            extend_lens=np.ones(self.batch, np.int64),
            prefix_lens=np.full(self.batch, length - 1),
            out_cache_loc=slots,
            logits_indices=None,
            sampling=info,
            sampled_rows=rows,
            future_indices=np.arange(self.batch),
            table=TableChanges(rows * CONTEXT + length - 1, slots.astype(np.int32)),
        )


def built(contract: str, name: str, ctx: object, **options: object) -> Any:
    """Return a provider with its usual options, and these."""
    record = REGISTRY.get(contract, name)
    assert record is not None, f"there is no {contract} {name}"
    return record.load()(record.options_model()(**options), ctx)


def count(model: str, batch: int) -> Iterator[Count]:
    """Count the steps of a model, greedy and sampled."""
    one, two = Rig(model, 1, batch), Rig(model, 2, batch)
    for name, sampling in SAMPLING.items():
        few, more = one.step(sampling), two.step(sampling)
        # The first layer ends where the second begins: after the last operator that both have from the beginning on.
        layer = len(more) - len(few)
        start = few.index("rms_norm_kernel") + 1
        outside = (*few[:start], *few[start + layer :])
        yield Count(model, name, tuple(more[start : start + layer]), outside)


def measured(batch: int) -> list[Count]:
    """Count all models."""
    return [one for model in MODELS for one in count(model, batch)]


def problems(found: Sequence[Count]) -> list[str]:
    """Return what is more than it may be."""
    wrong = []
    for one in found:
        at = f"{one.model}, {one.sampling}"
        most = MOST_WITH_EXPERTS if "num_experts" in MODELS[one.model] else MOST_A_LAYER
        if len(one.layer) > most:
            wrong.append(f"{at}: {len(one.layer)} launches a layer, {most} at most: {', '.join(one.layer)}")
        if len(one.outside) > MOST_OUTSIDE:
            wrong.append(f"{at}: {len(one.outside)} outside, {MOST_OUTSIDE} at most: {', '.join(one.outside)}")
    outside = {(one.model, one.sampling): len(one.outside) for one in found}
    wrong += [
        f"{model}: sampling launches more" for model in MODELS if outside[model, "sampled"] > outside[model, "greedy"]
    ]
    return wrong


def table(found: Sequence[Count]) -> str:
    """Return rows of Markdown, the same for a terminal."""
    lines = ["| model | step | a layer | outside | 32 layers |", "|---|---|---:|---:|---:|"]
    lines += [
        f"| {one.model} | {one.sampling} | {len(one.layer)} | {len(one.outside)} "
        f"| {32 * len(one.layer) + len(one.outside)} |"
        for one in found
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="requests of the decode step")
    parser.add_argument("--list", action="store_true", help="name all that is launched")
    parser.add_argument("--markdown", type=Path, help="write the table to this file, too")
    parser.add_argument("--transformers", action="store_true", help="count models through transformers")
    args = parser.parse_args()
    if args.transformers:
        from benchmarks import launches_transformers

        launches_transformers.report(args.batch, args.list, args.markdown)
        return
    found = measured(args.batch)
    print(table(found))
    if args.list:
        for one in found:
            print(f"\n{one.model}, {one.sampling}\na layer: {', '.join(one.layer)}\noutside: {', '.join(one.outside)}")
    if args.markdown is not None:
        args.markdown.write_text(table(found) + "\n")
    if wrong := problems(found):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
