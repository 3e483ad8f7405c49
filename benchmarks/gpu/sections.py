"""The sections: each measures one thing, and returns rows of figures by name."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.attention import attention
from benchmarks.gpu.bench import GREEDY, Bench, Model, no_waiting
from pegboard.core.interfaces.options import NoOptions
from pegboard.core.interfaces.sampler import Sampler, SamplerContext
from pegboard.core.interfaces.sampling import SamplingBatch, SamplingParams
from pegboard.core.pipeline.running import NUMBERS
from pegboard.plugins.sampler_torch.sampler import TorchSampler
from pegboard.toolkit.device_queue import queue_of

Rows = list[dict[str, Any]]
Section = Callable[[Bench], Rows]

SIZES = (1, 8, 64)


def environment(bench: Bench) -> Rows:
    """Tell versions, the device, and its copy bandwidth, which roofs come from."""
    row: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "flashinfer-python"):
        try:
            row[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            row[package] = None
    if not bench.dry:
        about = torch.cuda.get_device_properties(bench.device)
        row |= {
            "device": about.name,
            "capability": f"{about.major}.{about.minor}",
            "GiB": round(about.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return [{**row, "copy_GB/s": bench.bandwidth() / 1e9}]


def correctness(bench: Bench) -> Rows:
    """Whether replays give the tokens of eager steps, in batches of several sizes.

    The eager batch has as many requests as the graph: matrix products of other sizes are other kernels, which round
    otherwise, and logits of random weights lie so close together that tokens then differ.
    """
    rows: Rows = []
    config = {"num_hidden_layers": 4, "vocab_size": 4096} if not bench.dry else {}
    most = bench.either(64, 8)
    for count in bench.either((1, 3, 8, 30, 64), (1, 3, 8)):
        size = next(size for size in (1, 8, 64) if size >= count)
        tokens = []
        for graphs, launched in ((False, size), (True, count)):
            torch.manual_seed(0)
            model = Model(bench, most, bench.either(300, 60), graphs=graphs, config=config)
            tokens.append([model.launch(launched).result().tokens[:count].tolist() for _ in range(8)])
        same = sum(eager == replayed for eager, replayed in zip(*tokens, strict=True))
        rows.append({"requests": count, "steps": 8, "steps_alike": same})
    return rows


def waiting(bench: Bench) -> Rows:
    """How many of 200 steps wait for the device while they are launched: none may."""
    model = Model(bench, 8, bench.either(1024, 60))
    model.launch(8).result()
    steps = bench.either(200, 3)
    pending = []
    with no_waiting(bench):
        for _ in range(steps):
            pending.append(model.launch(8))
    for one in pending:
        one.result()
    return [{"steps": steps, "waits": 0}]


def decode(bench: Bench) -> Rows:
    """Time a decode step of an 8B-shaped model against what reading weights and KV takes."""
    rows: Rows = []
    bandwidth, context = bench.bandwidth(), bench.either(1024, 60)
    for graphs in (True, False):
        model = Model(bench, bench.either(64, 8), context, graphs=graphs)
        for count in bench.either(SIZES, (1, 8)):
            took = model.step_seconds(count, bench.either(100, 3))
            roof = (model.weight_bytes + count * context * model.kv_bytes) / bandwidth
            row = {"requests": count, "graphs": graphs, "step_ms": 1e3 * took, "roof_ms": 1e3 * roof}
            rows.append({**row, "share": roof / took})
        del model
    return rows


def idle(bench: Bench) -> Rows:
    """Find the share of a step in which the device has nothing to do."""
    rows: Rows = []
    model = Model(bench, bench.either(64, 8), bench.either(1024, 60))
    for count in bench.either(SIZES, (1, 8)):
        steps = bench.either(100, 3)
        busy = bench.on_device(functools.partial(model.launch, count), steps)
        took = model.step_seconds(count, steps)
        row = {"requests": count, "step_ms": 1e3 * took, "device_ms": 1e3 * busy}
        rows.append({**row, "idle": max(0.0, 1 - busy / took)})
    return rows


def eight_bit(bench: Bench) -> Rows:
    """Find what 8-bit KV saves: bytes of a token, and time of a step whose KV is much of what it reads."""
    rows: Rows = []
    count, context = bench.either(64, 8), bench.either(4096, 120)
    config = {} if bench.dry else {"num_hidden_layers": 8}
    for kv_dtype in (None, torch.float8_e4m3fn, torch.float8_e5m2):
        model = Model(bench, count, context, kv_dtype=kv_dtype, graphs=not bench.dry, config=config)
        took = bench.on_device(functools.partial(model.launch, count), bench.either(50, 3))
        name = str(kv_dtype or bench.dtype).removeprefix("torch.")
        rows.append({"kv": name, "bytes": model.kv_bytes, "step_ms": 1e3 * took})
        del model
    return rows


def sampling(bench: Bench) -> Rows:
    """Time the drawing of tokens, by the sampler for GPUs and by that in torch."""
    rows: Rows = []
    vocab, queue = bench.either(128256, 256), queue_of(bench.device)
    ctx = SamplerContext(vocab, bench.device)
    samplers: dict[str, Sampler[Any]] = {"measured": bench.sampler(ctx), "torch": TorchSampler(NoOptions(), ctx)}
    kinds = {"greedy": GREEDY, "top_p": SamplingParams(temperature=0.8, top_p=0.9, top_k=50)}
    for count in bench.either((1, 64, 256), (1, 8)):
        logits = torch.randn(count, vocab, device=bench.device) * 4
        (steps,) = queue.bring(np.zeros(count, np.int64))
        for kind, params in kinds.items():
            numbers = np.array([params.row(index, vocab) for index in range(count)], NUMBERS)
            batch = SamplingBatch.of(numbers, steps, vocab, lambda one: queue.bring(one)[0])
            row: dict[str, Any] = {"rows": count, "kind": kind}
            for name, sampler in samplers.items():
                row[f"{name}_us"] = 1e6 * bench.median(functools.partial(sampler.sample, logits, batch), 20)
            rows.append(row)
    return rows


SECTIONS: dict[str, tuple[Section, float, str]] = {
    "environment": (environment, 60, "versions, device, copy bandwidth"),
    "correctness": (correctness, 60, "graphs against eager steps: all alike"),
    "waiting": (waiting, 40, "steps that wait for the device: none"),
    "attention": (attention, 100, "GB/s of decodes and TFLOP/s of prefills; goal: Triton at least 0.95 of FlashInfer"),
    "decode": (decode, 100, "step time and share of the roof; goal: 0.85 at 1 and 8 requests"),
    "idle": (idle, 40, "share of a step without work for the device; goal: 0.03 at most"),
    "eight_bit": (eight_bit, 50, "bytes of a token and step time with 8-bit KV"),
    "sampling": (sampling, 30, "microseconds of a draw"),
}
"""Each section with its time limit in seconds and what it measures; together at most 8 minutes."""
