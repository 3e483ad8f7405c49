"""Sizing: how many tokens of KV there is room for, and what holds them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pegboard.core.interfaces.errors import ConfigError, OutOfMemory
from pegboard.core.interfaces.kv_pool import KVPool, KVPoolContext
from pegboard.toolkit.cache.group_sizes import GroupSizes
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.system.memory import free_bytes

if TYPE_CHECKING:
    from pegboard.core.config.sections import EngineConfig
    from pegboard.core.config.select import Choice
    from pegboard.core.interfaces.layers import LayerSpec, ModelSpec
    from pegboard.core.interfaces.model_family import ModelContext

logger = logging.getLogger(__name__)

CPU_POOL_SHARE = 0.25
CPU_POOL_LIMIT = 8 * 2**30
GPU_POOL_SHARE = 0.85
"""What an unset `memory.max_total_tokens` takes of the memory that is free once weights are loaded."""

_GPU_CHUNKS = ((35 * 2**30, 2048), (160 * 2**30, 8192))
_CHUNK_ELSEWHERE = 4096
"""Chunk sizes by device memory where decodes wait for chunks: SGLang's defaults."""
_CHUNK_MIXED = 2048
"""Where they share their batches, on a GPU: the 99th percentile of gaps in streams is 56 to 58 ms with an 8B model and
64 streams on an H100, instead of 200 with chunks of 8,192 (docs/gpu-results.md)."""
_CHUNK_CPU = 512
"""Smaller, since a chunk delays every running request."""


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The pool of keys and values, in pages of the first KV group, and the longest context that fits into it."""

    pool: KVPool
    num_pages: int
    max_context_len: int


def count_pages(
    choice: Choice[KVPool, KVPoolContext],
    config: EngineConfig,
    model: ModelContext,
    spec: ModelSpec,
    reserved: int = 0,
    further: tuple[LayerSpec, ...] = (),
    kv_dtype: torch.dtype | None = None,
    room: int | None = None,
    sharing: int = 1,
    chunk: int | None = None,
) -> int:
    """Return the pages of KV's first group by the config or by what is free now. `reserved` bytes are left for others;
    `further` layers write into the pool beside the model's. KV is kept in `kv_dtype`, None for the model's. `room` is
    what the memory profiler has left for KV, None without one. What is free is for as many processes as are `sharing`
    it. A step computes `chunk` tokens of prompts; see `GroupSizes`.

    Raises ConfigError where `memory.max_total_tokens` holds no page, and OutOfMemory where it is more than is free.
    """
    page_size = config.memory.page_size
    sizes = _group_sizes(choice, config, model, spec, further, kv_dtype, chunk)
    free = max(0, free_bytes(model.device) // sharing - reserved)
    wanted = _pool_bytes(model.device, free, config.memory.gpu_share) if room is None else max(0, room - reserved)
    # Where no layer keeps all tokens, the first group's slots take no memory: there are as many as requests can use.
    usable = spec.max_context_len * config.scheduler.max_running_requests // page_size
    num_pages = (config.memory.max_total_tokens or page_size * sizes.fitting(wanted, usable)) // page_size
    if num_pages < 1:
        raise _no_page(config, free, wanted)
    if sizes.nbytes(num_pages) > free:
        raise _too_large(num_pages, page_size, sizes, free, model.device)
    return num_pages


def make_memory(
    choice: Choice[KVPool, KVPoolContext],
    config: EngineConfig,
    model: ModelContext,
    spec: ModelSpec,
    num_pages: int,
    further: tuple[LayerSpec, ...] = (),
    kv_dtype: torch.dtype | None = None,
    chunk: int | None = None,
) -> KVMemory:
    """Build a pool of so many pages, and cap the context by it: every request must fit alone."""
    page_size = config.memory.page_size
    sizes = _group_sizes(choice, config, model, spec, further, kv_dtype, chunk)
    max_context_len = min(spec.max_context_len, num_pages * page_size)
    if max_context_len < spec.max_context_len:
        logger.warning(
            "the KV pool holds %d tokens, so prompt and output together are limited to that, not to the model's %d",
            max_context_len,
            spec.max_context_len,
        )
    ctx = pool_context(num_pages, page_size, model, spec, further, kv_dtype)
    pool = choice.build(replace(ctx, further_pages=sizes.further(num_pages)))
    return KVMemory(pool, num_pages, max_context_len)


def _group_sizes(
    choice: Choice[KVPool, KVPoolContext],
    config: EngineConfig,
    model: ModelContext,
    spec: ModelSpec,
    further: tuple[LayerSpec, ...],
    kv_dtype: torch.dtype | None,
    chunk: int | None,
) -> GroupSizes:
    memory, step = config.memory, chunk or config.scheduler.max_prefill_tokens
    layers, dtype = spec.layers + further, kv_dtype or model.dtype
    return GroupSizes.of(choice.cls, layers, spec, dtype, memory.page_size, memory.typical_length, step)


def _too_large(num_pages: int, page_size: int, sizes: GroupSizes, free: int, device: torch.device) -> OutOfMemory:
    return OutOfMemory(
        f"a KV pool of {num_pages * page_size} tokens takes {sizes.nbytes(num_pages) / 2**30:.1f} GiB, but only "
        f"{free / 2**30:.1f} GiB are free on {device}; lower memory.max_total_tokens to at most "
        f"{sizes.fitting(free, num_pages) * page_size}"
    )


def _no_page(config: EngineConfig, free: int, wanted: float) -> ConfigError | OutOfMemory:
    page_size, tokens = config.memory.page_size, config.memory.max_total_tokens
    if tokens:
        return ConfigError(f"memory.max_total_tokens: {tokens} tokens hold no page of {page_size} (memory.page_size)")
    return OutOfMemory(
        f"nothing is left for KV: {free / 2**30:.2f} GiB are free beside the weights, and KV may have "
        f"{wanted / 2**30:.2f} GiB of them, less than a page of {page_size} tokens (memory.page_size); lower "
        "scheduler.chunked_prefill_size or scheduler.max_running_requests"
    )


def pool_context(
    num_pages: int,
    page_size: int,
    model: ModelContext,
    spec: ModelSpec,
    further: tuple[LayerSpec, ...] = (),
    kv_dtype: torch.dtype | None = None,
) -> KVPoolContext:
    """Return what a pool of so many pages is built from. KV is kept in `kv_dtype`, None for the model's."""
    zeroed = frozenset(layer.layer_id for layer in further)
    layers, dtype = spec.layers + further, kv_dtype or model.dtype
    return KVPoolContext(num_pages, page_size, layers, dtype, model.device, zeroed, model.dtype)


def make_rows(config: EngineConfig, device: torch.device, width: int, *, mirrored: bool = False) -> ReqToTokenPool:
    """Return the table from positions to slots, `width` tokens per request, `mirrored` where batches run elsewhere as
    well. Raises OutOfMemory if it does not fit.
    """
    count = config.scheduler.max_running_requests
    needed, free = (count + 1) * width * 4, free_bytes(device)
    if needed > free:
        raise OutOfMemory(
            f"scheduler.max_running_requests: a table of {count} requests with {width} tokens each takes "
            f"{needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are free on {device}; lower it"
        )
    mirrored = mirrored or device.type != "cpu" or config.scheduler.loop == "overlap"
    return ReqToTokenPool(count, width, config.memory.page_size, mirrored=mirrored)


def chunk_size(config: EngineConfig, device: torch.device, *, splits: bool = False) -> int | None:
    """Return the tokens of one chunk of a prompt; None where prompts are not cut. `splits`: a stage splits prefills, so
    that decodes join them only where the config says so.
    """
    size = config.scheduler.chunked_prefill_size
    if size == 0:
        return None
    if size is not None:
        return size
    mixed = config.scheduler.mixed_chunk
    return max(_default_chunk(device, mixed=not splits if mixed is None else mixed), config.memory.page_size)


def most_new_tokens(config: EngineConfig, chunk: int | None) -> int | None:
    """Return the most tokens of a step with chunks of prompts; None where prompts are not cut. A chunk has a page at
    least, however many decodes it joins.
    """
    return None if chunk is None else max(chunk, config.scheduler.max_running_requests + config.memory.page_size)


def _default_chunk(device: torch.device, *, mixed: bool) -> int:
    if device.type != "cuda":
        return _CHUNK_CPU
    if mixed:
        return _CHUNK_MIXED
    total = torch.cuda.get_device_properties(device).total_memory
    return next((size for below, size in _GPU_CHUNKS if total < below), _CHUNK_ELSEWHERE)


def _pool_bytes(device: torch.device, free: int, gpu_share: float | None) -> float:
    if device.type == "cuda":
        return free * (GPU_POOL_SHARE if gpu_share is None else gpu_share)
    return min(free * CPU_POOL_SHARE, CPU_POOL_LIMIT)
