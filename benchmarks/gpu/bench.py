"""What the sections share: the device or its stand-in, timing, and a model of random weights with its worker."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from pegboard.conformance.rig.fixed_attention import FixedAttention
from pegboard.conformance.rig.tape import TapeCapture
from pegboard.core.interfaces.attention import AttentionBackend, AttentionContext
from pegboard.core.interfaces.batch import ModelWorkerBatch, SamplingInfo, TableChanges
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.model_runner import ModelRunnerContext
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampler import Sampler, SamplerContext
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.pipeline.running import NUMBERS
from pegboard.core.worker.worker import PendingResult, Worker
from pegboard.plugins.attn_triton.backend import TritonAttention
from pegboard.plugins.attn_triton.options import TritonAttentionOptions
from pegboard.plugins.memory_paged.pool import MHAPool
from pegboard.plugins.model_dense.network import DenseNetwork
from pegboard.plugins.runner_layered.options import LayeredOptions
from pegboard.plugins.runner_layered.runner import LayeredRunner
from pegboard.plugins.sampler_torch.sampler import TorchSampler
from pegboard.plugins.sampler_triton.options import TritonSamplerOptions
from pegboard.plugins.sampler_triton.sampler import TritonSampler
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.device_queue import queue_of
from pegboard.toolkit.graphs import capture_of
from pegboard.toolkit.model.decoder_spec import DecoderSpec
from pegboard.toolkit.model.dummy import draw_weights
from pegboard.toolkit.model.layers import Linears

PAGE = 16
GREEDY = SamplingParams(temperature=0.0)
FULL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
"""The shape of Llama 3 8B."""
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


class Skipped(Exception):
    """A section, or a part of one, that cannot be measured here; the text says why."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where it is measured. `dry`: on a CPU, over stand-ins with tiny shapes, so that figures have no meaning."""

    dry: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    def config(self, **more: Any) -> dict[str, Any]:
        """Return the config of the model that is measured."""
        return {**FULL, **(TINY if self.dry else {}), **more}

    def either(self, full: Any, tiny: Any) -> Any:
        """Return the size to measure with, here."""
        return tiny if self.dry else full

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def median(self, run: Callable[[], object], times: int) -> float:
        """Return the median seconds of a call, the device's work included."""
        times = min(times, 3) if self.dry else times
        found = []
        for index in range(times + 2):
            self.synchronize()
            start = time.perf_counter()
            run()
            self.synchronize()
            if index >= 2:
                found.append(time.perf_counter() - start)
        return statistics.median(found)

    def on_device(self, run: Callable[[], object], times: int) -> float:
        """Return the seconds that the device takes for one of many calls in a row: what the host takes is not seen if
        it is less.
        """
        if self.dry:
            return self.median(run, times)
        run()
        event: Any = torch.cuda.Event
        start, stop = event(enable_timing=True), event(enable_timing=True)
        self.synchronize()
        start.record()
        for _ in range(times):
            run()
        stop.record()
        self.synchronize()
        return float(start.elapsed_time(stop)) / 1e3 / times

    def in_graph(self, run: Callable[[], object], calls: int = 10) -> float:
        """Return the seconds that the device takes for a call, the median of graphs of `calls` of them: what the host
        takes to launch them is not in it.
        """
        if self.dry:
            return self.median(run, 1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                run()
        return self.on_device(graph.replay, 7) / calls

    def bandwidth(self) -> float:
        """Return the bytes that are read and written per second when large memory is copied."""
        size: int = self.either(2**30, 2**20)
        one = torch.empty(size, dtype=torch.uint8, device=self.device)
        other = torch.empty_like(one)
        return 2 * size / self.on_device(lambda: other.copy_(one), 20)

    def attention(self, ctx: AttentionContext) -> AttentionBackend[Any]:
        """Return the backend that is measured."""
        if self.dry:
            return FixedAttention(NoOptions(), ctx)
        return TritonAttention(TritonAttentionOptions(), ctx)

    def sampler(self, ctx: SamplerContext) -> Sampler[Any]:
        return TorchSampler(NoOptions(), ctx) if self.dry else TritonSampler(TritonSamplerOptions(), ctx)


def installed(package: str) -> None:
    """Raise Skipped where a package is missing."""
    if find_spec(package) is None:
        raise Skipped(f"{package} is not installed")


class Model:
    """A worker over a model of random weights, for decodes of up to `most` requests, each in memory of its own."""

    def __init__(
        self,
        bench: Bench,
        most: int,
        context: int,
        *,
        graphs: bool = True,
        kv_dtype: torch.dtype | None = None,
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.bench, self.most, self.context = bench, most, context
        hf_config = bench.config(**config)
        spec = DecoderSpec.from_config(hf_config)
        self.spec = spec.model_spec(context_length=None, eos_token_ids=frozenset())
        device, layers = bench.device, self.spec.layers
        self.network = DenseNetwork(spec, Linears(bench.dtype, device))
        draw_weights(self.network)
        width = -(-(context + 1) // PAGE) * PAGE
        self.rows = ReqToTokenPool(most, width, PAGE, mirrored=True)
        self.rows.host[1:] = PAGE + np.arange(most * width).reshape(most, width)
        kept = bench.dtype if kv_dtype is None else kv_dtype
        self.pool = MHAPool(NoOptions(), KVPoolContext(most * width // PAGE, PAGE, layers, kept, device))
        self._draw_kv()
        queue, sizes = queue_of(device), tuple(sorted({min(size, most) for size in (1, 8, 64, most)})) if graphs else ()
        about = AttentionContext(
            layers, PAGE, bench.dtype, device, most, width, kv_dtype=kv_dtype, graph_sizes=sizes, bring=queue.bring
        )
        capture = (TapeCapture() if bench.dry else capture_of(device)) if graphs else None
        graph = frozenset({"graph"})
        ctx = ModelRunnerContext(
            self.spec,
            ModelContext(Path(), hf_config, bench.dtype, device),
            self.network,
            bench.attention(about),
            bench.sampler(SamplerContext(self.spec.vocab_size, device)),
            (),
            device,
            provides={"attention": graph, "model_family": graph},
            capture=capture,
            graph_sizes=sizes,
        )
        options = LayeredOptions(graphs="on" if graphs else "off", graph_sizes=list(sizes) or None)
        self.runner = LayeredRunner(options, ctx)
        self.worker = Worker(self.runner, ctx.attention, self.pool, self.rows, queue)
        self.runner.start(self.pool, self.worker.batches.table)
        self._length = context

    def _draw_kv(self) -> None:
        """Fill the pool with random numbers: a device reads zeros faster."""
        for layer in range(len(self.spec.layers)):
            for buffer in (self.pool.keys(layer), self.pool.values(layer)):
                generator = torch.Generator(self.bench.device).manual_seed(layer)
                for part in torch.split(buffer, 2**16):  # 8-bit types have no `normal_`
                    part.copy_(torch.randn(part.shape, device=part.device, generator=generator))

    @property
    def weight_bytes(self) -> int:
        """Bytes that a decode step reads of the weights: all but the embeddings, of which it looks up a few rows."""
        embedding = self.network.embedding
        assert embedding is not None, "the whole model is on this device"
        return sum(one.nbytes for one in self.network.parameters()) - embedding.weight.nbytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of one token."""
        return MHAPool.bytes_per_token(self.spec.layers, self.pool.keys(0).dtype)

    def launch(self, count: int, params: SamplingParams = GREEDY) -> PendingResult:
        """Launch a decode of `count` requests at the end of their contexts; their tokens come from the step before."""
        length = self._length
        rows = np.arange(1, count + 1)
        numbers = np.array([params.row(index, self.spec.vocab_size) for index in range(count)], NUMBERS)
        slots = self.rows.host[rows, length - 1].astype(np.int64)
        work = ModelWorkerBatch(
            bid=0,
            forward_mode=ForwardMode.DECODE,
            input_ids=np.full(count, -1),
            positions=np.full(count, length - 1),
            rows=rows,
            seq_lens=np.full(count, length),
            extend_lens=np.ones(count, np.int64),
            prefix_lens=np.full(count, length - 1),
            out_cache_loc=slots,
            logits_indices=None,
            sampling=SamplingInfo(count, numbers, np.zeros(count, np.int64)),
            sampled_rows=rows,
            future_indices=np.arange(count),
            table=TableChanges(rows * self.rows.host.shape[1] + length - 1, slots.astype(np.int32)),
        )
        return self.worker.launch(work)

    def in_turns(self, count: int, steps: int) -> Iterator[PendingResult]:
        """Launch steps one ahead, as the overlap loop does, and yield each when the one behind it is launched."""
        before = self.launch(count)
        for _ in range(steps):
            after = self.launch(count)
            yield before
            before = after
        yield before

    def step_seconds(self, count: int, steps: int) -> float:
        """Return the seconds of a step, with one launched ahead."""
        for one in self.in_turns(count, 2):
            one.result()
        self.bench.synchronize()
        start = time.perf_counter()
        for one in self.in_turns(count, steps):
            one.result()
        return (time.perf_counter() - start) / (steps + 1)


@contextmanager
def no_waiting(bench: Bench) -> Iterator[None]:
    """Have CUDA raise for whatever waits for the device."""
    if bench.dry:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
