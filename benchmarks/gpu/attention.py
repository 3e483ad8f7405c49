"""Section `attention`: the backends' kernels over paged KV, against FlashInfer's and torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.bench import PAGE, Bench, Skipped, installed
from benchmarks.gpu.paged import Paged
from pegboard.core.interfaces.attention import AttentionBackend, AttentionContext
from pegboard.core.registry.registry import Registry

Rows = list[dict[str, Any]]


def attention(bench: Bench) -> Rows:
    """One layer of Llama 3 8B's heads: decodes by bytes of KV per second, prefills by operations."""
    rows: Rows = []
    for count in bench.either((1, 8, 64), (1, 2)):
        for length in bench.either((1024, 8192), (30,)):
            paged = Paged(bench, [length] * count, page_size=PAGE)
            row: dict[str, Any] = {"case": f"decode {count} x {length}"}
            for name, took in times(bench, paged):
                row[f"{name}_GB/s"] = took if isinstance(took, str) else paged.kv_bytes / took / 1e9
            rows.append(row)
    for length in bench.either((2048, 8192), (20,)):
        paged = Paged(bench, [length], new=length, page_size=PAGE)
        row = {"case": f"prefill {length}"}
        for name, took in times(bench, paged):
            row[f"{name}_TFLOP/s"] = took if isinstance(took, str) else paged.flops / took / 1e12
        rows.append(row)
    return rows


def times(bench: Bench, paged: Paged) -> Iterator[tuple[str, float | str]]:
    """Yield for each backend the seconds of a layer, or why it is left out."""
    calls: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
        "measured": lambda: paged.call(bench.attention(paged.ctx)),
        "flashinfer": lambda: paged.call(flashinfer(paged.ctx, "fa2")),
        "flashinfer_fa3": lambda: paged.call(flashinfer(paged.ctx, "fa3")),
        "sdpa": paged.dense,
    }
    for name, make in calls.items():
        try:
            yield name, bench.in_graph(make())
        except Skipped as reason:
            yield name, f"skipped: {reason}"
        except Exception as error:  # a library that cannot compile leaves the others their rows
            yield name, f"failed: {str(error)[-120:]}"


def flashinfer(ctx: AttentionContext, kernels: str) -> AttentionBackend[Any]:
    """Return FlashInfer's backend with `kernels` of its own. Raises Skipped where it cannot work."""
    installed("flashinfer")
    record = Registry.discover().get("attention", "flashinfer")
    if record is None:
        raise Skipped("there is no attention backend of this name")
    options = record.options_model().model_validate({"backend": kernels})
    if (reason := record.load().supports(options, ctx)) is not None:
        raise Skipped(reason)
    backend: AttentionBackend[Any] = record.load()(options, ctx)
    return backend
