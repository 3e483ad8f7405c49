"""Section `attention`: the backends' kernels over paged KV, against FlashInfer's and torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.bench import PAGE, Bench, Skipped, installed
from pegboard.conformance.attention_fakes import AttentionRig, make_layer
from pegboard.core.interfaces.attention import AttentionBackend, AttentionContext
from pegboard.core.interfaces.layers import LayerSpec
from pegboard.core.registry.registry import Registry

Rows = list[dict[str, Any]]


def attention(bench: Bench) -> Rows:
    """One layer of Llama 3 8B's heads: decodes by bytes of KV per second, prefills by operations."""
    heads, kv_heads, dim = bench.either((32, 8, 128), (4, 2, 16))
    layer = make_layer(heads, kv_heads, dim)
    rows: Rows = []
    for count in bench.either((1, 8, 64), (1, 2)):
        for length in bench.either((1024, 8192), (30,)):
            rig = rig_of(bench, layer, [(length - 1, 1)] * count)
            nbytes = count * length * kv_heads * 2 * dim * bench.dtype.itemsize
            row: dict[str, Any] = {"case": f"decode {count} x {length}"}
            for name, took in times(bench, rig):
                row[f"{name}_GB/s"] = took if isinstance(took, str) else nbytes / took / 1e9
            rows.append(row)
    for length in bench.either((2048, 8192), (20,)):
        rig = rig_of(bench, layer, [(0, length)])
        flops = 2 * heads * 2 * dim * length * length / 2
        row = {"case": f"prefill {length}"}
        for name, took in times(bench, rig):
            row[f"{name}_TFLOP/s"] = took if isinstance(took, str) else flops / took / 1e12
        rows.append(row)
    return rows


def rig_of(bench: Bench, layer: LayerSpec, lens: list[tuple[int, int]]) -> AttentionRig:
    return AttentionRig([layer], lens, page_size=PAGE, dtype=bench.dtype, device=bench.device)


def times(bench: Bench, rig: AttentionRig) -> Iterator[tuple[str, float | str]]:
    """Yield for each backend the seconds of a layer, or why it is left out."""
    calls: dict[str, Callable[[], Callable[[], object]]] = {
        "measured": lambda: call_of(rig, bench.attention(rig.context_for())),
        "flashinfer": lambda: call_of(rig, flashinfer(rig.context_for())),
        "sdpa": lambda: dense(rig),
    }
    for name, make in calls.items():
        try:
            run = make()
        except Skipped as reason:
            yield name, f"skipped: {reason}"
        else:
            yield name, bench.on_device(run, 20)


def call_of(rig: AttentionRig, backend: AttentionBackend[Any]) -> Callable[[], object]:
    """Return a layer's call of a backend; KV is there already, so nothing is written."""
    batch = rig.batch(backend)
    rig.pool.fill(0, 0.0)
    backend.prepare(batch)
    return lambda: backend.forward(rig.q[0], None, None, rig.layers[0], batch)


def flashinfer(ctx: AttentionContext) -> AttentionBackend[Any]:
    """Return FlashInfer's backend. Raises Skipped where it cannot work."""
    installed("flashinfer")
    record = Registry.discover().get("attention", "flashinfer")
    if record is None:
        raise Skipped("there is no attention backend of this name")
    options = record.options_model()()
    if (reason := record.load().supports(options, ctx)) is not None:
        raise Skipped(reason)
    backend: AttentionBackend[Any] = record.load()(options, ctx)
    return backend


def dense(rig: AttentionRig) -> Callable[[], object]:
    """Return torch's fused attention over K and V that lie ready and without pages."""
    q, k, v = (
        torch.stack(list(one)).transpose(1, 2) for one in (torch.split(rig.q[0], rig.new.tolist()), rig.k[0], rig.v[0])
    )
    causal = int(rig.prefix.max()) == 0
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
