"""Attention backends alone: microseconds per layer, and against dense attention over memory that needs no paging.

    python benchmarks/attention.py [--backends torch] [--dtype float32] [--device cpu] [--page-size 1]
                                   [--heads 9] [--kv-heads 3] [--dim 64] [--runs 50]

The shapes are those of SmolLM2-135M: decode steps of 1, 8 and 32 requests at 200 tokens of context, 8 at 50 to 800, a
prompt of 512, a prompt of 3000, and a chunk of 512 behind a prefix of 1024. `dense` is torch's fused attention over
ready-made K and V without pages, padded to the longest; it writes no KV. Medians; the backends take turns in one
run, so that other programs on the machine disturb them alike: compare ratios. `prepare` is paid once per step, by all
layers together.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from pegboard.conformance.attention.batches import AttentionRig, make_layer
from pegboard.core.interfaces.attention import AttentionBackend
from pegboard.core.interfaces.forward import ForwardBatch
from pegboard.core.interfaces.kv_pool import KVPoolContext
from pegboard.core.registry.registry import Registry

CASES = {
    "decode 1 x 200": [(199, 1)],
    "decode 8 x 200": [(199, 1)] * 8,
    "decode 32 x 200": [(199, 1)] * 32,
    "decode 8 x 50-800": [(50 + 107 * index, 1) for index in range(8)],
    "prefill 512": [(0, 512)],
    "prefill 3000": [(0, 3000)],
    "chunk 512 at 1024": [(1024, 512)],
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["torch"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--runs", type=int, default=50)
    return parser.parse_args()


def dense(rig: AttentionRig) -> Callable[[], torch.Tensor]:
    """Attention over K and V that lie ready, [batch, heads, tokens, dim], padded to the longest request."""
    queries = torch.nn.utils.rnn.pad_sequence(list(torch.split(rig.q[0], rig.new.tolist())), batch_first=True)
    keys, values = (torch.nn.utils.rnn.pad_sequence(one[0], batch_first=True) for one in (rig.k, rig.v))
    q, k, v = (one.transpose(1, 2) for one in (queries, keys, values))
    if rig.prefix.max() == 0:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    lens = torch.from_numpy(rig.prefix).to(rig.device)[:, None, None, None]
    seen = torch.arange(k.shape[2], device=rig.device) <= lens + torch.arange(q.shape[2], device=rig.device)[:, None]
    mask = torch.zeros(seen.shape, dtype=rig.dtype, device=rig.device).masked_fill_(~seen, float("-inf"))
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def calls(name: str, rig: AttentionRig, pool: Any, registry: Registry) -> tuple[Callable[[], object], ...]:
    """Return a backend's layer call and its `prepare`."""
    record = registry.get("attention", name)
    if record is None:
        raise SystemExit(f"no attention backend {name!r} is installed")
    reason = record.load().supports(None, rig.context_for())
    if reason is not None:
        raise SystemExit(f"{name}: {reason}")
    backend: AttentionBackend = record.load()(record.options_model()(), rig.context_for())
    batch: ForwardBatch = rig.batch(backend)
    batch.kv_pool = pool
    backend.prepare(batch)
    k, v = rig.new_kv()
    return lambda: backend.forward(rig.q[0], k, v, rig.layers[0], batch), lambda: backend.prepare(batch)


def real_pool(rig: AttentionRig, registry: Registry) -> Any:
    """Return the rig's memory in the pool that a server would use."""
    pages = rig.pool.num_slots // rig.page_size - 1
    record = registry.providers("kv_pool")[0]
    context = KVPoolContext(pages, rig.page_size, rig.layers, rig.dtype, rig.device)
    pool = record.load()(record.options_model()(), context)
    pool.keys(0).copy_(rig.pool.keys(0))
    pool.values(0).copy_(rig.pool.values(0))
    return pool


def medians(functions: list[Callable[[], object]], runs: int, device: torch.device) -> list[float]:
    """Microseconds of each, called in turns."""
    times: list[list[float]] = [[] for _ in functions]
    for run in range(runs + 3):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if run >= 3:
                own.append(1e6 * (time.perf_counter() - start))
    return [statistics.median(own) for own in times]


@torch.inference_mode()
def main() -> None:
    args = arguments()
    registry = Registry.discover()
    dtype, device = getattr(torch, args.dtype), torch.device(args.device)
    layer = make_layer(args.heads, args.kv_heads, args.dim)
    print(f"{args.heads} heads, {args.kv_heads} kv heads of {args.dim}, {args.dtype}, page size {args.page_size},")
    print(f"{device.type}, {torch.get_num_threads()} threads; microseconds, and times dense")
    columns = "".join(f"{name:>12}{'':>8}{'prepare':>10}" for name in args.backends)
    print(f"{'':<20}{'dense':>10}{columns}")
    for case in args.cases:
        rig = AttentionRig([layer], CASES[case], page_size=args.page_size, dtype=dtype, device=device)
        pool = real_pool(rig, registry)
        functions = [dense(rig), *(call for name in args.backends for call in calls(name, rig, pool, registry))]
        runs = max(5, args.runs // 5) if "3000" in case else args.runs
        base, *rest = medians(functions, runs, device)
        cells = "".join(
            f"{layer_time:>12.0f}{layer_time / base:>7.2f}x{prepare:>10.0f}"
            for layer_time, prepare in zip(rest[::2], rest[1::2], strict=True)
        )
        print(f"{case:<20}{base:>10.0f}{cells}")


if __name__ == "__main__":
    main()
