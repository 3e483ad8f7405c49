"""Choosing: the providers of everything that touches the device, before any weights are read; then the weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from pegboard.core.engine.memory_profiler import MemoryProfiler
from pegboard.core.engine.reserving import Providers, further_layers
from pegboard.core.engine.sizing import KVMemory, count_pages, make_memory, most_new_tokens, pool_context
from pegboard.core.interfaces.ahead import KVLayersContext, LoadedModel
from pegboard.core.interfaces.attention import AttentionBackend, AttentionContext
from pegboard.core.interfaces.contracts import ATTENTION, KV_POOL, LOGITS_PROCESSOR, RUNNER, SAMPLER
from pegboard.core.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from pegboard.core.interfaces.model_runner import ModelRunner, ModelRunnerContext
from pegboard.core.interfaces.sampler import Sampler, SamplerContext
from pegboard.core.worker.device_parts import state_memory
from pegboard.toolkit.device_queue import DeviceQueue, HostQueue, queue_of
from pegboard.toolkit.graphs import capture_of
from pegboard.toolkit.model.dtypes import kv_dtype_name, resolve_kv_dtype
from pegboard.toolkit.model.eight_bit import is_eight_bit
from pegboard.toolkit.model.pool_probe import PoolProbe
from pegboard.toolkit.model.room_for_kv import CudaMeter, room_for_kv
from pegboard.toolkit.model.sampling_defaults import sampling_defaults
from pegboard.toolkit.system.culprits import Culprits

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.config.sections import EngineConfig
    from pegboard.core.config.select import Choice, Selection
    from pegboard.core.interfaces.graphs import GraphCapture
    from pegboard.core.interfaces.kv_pool import KVPool, KVPoolContext
    from pegboard.core.interfaces.layers import LayerSpec, ModelSpec
    from pegboard.core.interfaces.model_family import ModelContext, ModelFamily, Network
    from pegboard.core.interfaces.stage import DevicePart
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.core.registry.hooks import Hooks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was chosen for a model. `asked` are the processors and the sampler that look at a request's parameters;
    `queue` brings all that a step needs to the device; KV is kept in `kv_dtype`. `providers` builds what plugins ask
    for; `further` are their layers of the KV pool. The runner was chosen by `about`. `sampling_defaults` are for what
    requests leave open.
    """

    resolved: ResolvedConfig
    selection: Selection
    model: ModelContext
    spec: ModelSpec
    tokenizer: Tokenizer
    attention: AttentionBackend
    processors: tuple[LogitsProcessor, ...]
    sampler: Sampler
    asked: tuple[LogitsProcessor | Sampler, ...]
    runner: Choice[ModelRunner, ModelRunnerContext]
    pool: Choice[KVPool, KVPoolContext]
    kv_dtype: torch.dtype
    providers: Providers
    about: ModelRunnerContext
    further: tuple[LayerSpec, ...] = ()
    culprits: Culprits = field(default_factory=Culprits)
    queue: DeviceQueue = field(default_factory=HostQueue)
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    def runner_context(self, network: Network | None, chunk: int | None) -> ModelRunnerContext:
        """Return what the runner is built from; `network` is None for one that reads the weights itself."""
        most = most_new_tokens(self.resolved.engine, chunk)
        return replace(self.about, network=network, provides=_provided(self.selection), max_new_tokens=most)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A runner with its weights, the memory that was left for KV, and what KV depends on beside the model (`numerics`,
    of the runner and of device parts).
    """

    runner: ModelRunner
    memory: KVMemory
    numerics: tuple[str, str]


def choose_providers(
    resolved: ResolvedConfig,
    selection: Selection,
    model: ModelContext,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    hooks: Hooks,
    providers: Providers,
) -> Chosen:
    """Choose attention, sampler, processors, runner and pool, so that a wrong choice is known before weights are read.

    Raises ConfigError and PluginError, with what to change.
    """
    config, culprits, queue = resolved.engine, providers.culprits, queue_of(model.device)
    kv_dtype, capture = _kv_dtype(resolved, model, spec), capture_of(model.device)
    further = further_layers(hooks, KVLayersContext(config, spec, model, providers))
    attention_ctx = _attention_context(config, model, spec, spec.layers + further, kv_dtype)
    attention_ctx = replace(attention_ctx, graph_sizes=_graph_sizes(resolved, capture), bring=queue.bring)
    sampler_ctx = SamplerContext(spec.vocab_size, model.device)
    processor_ctx = LogitsProcessorContext(spec.vocab_size, model.device, spec.eos_token_ids, tokenizer, queue.bring)
    attention = selection.choose(ATTENTION, attention_ctx, _needs(attention_ctx))
    sampler = selection.choose(SAMPLER, sampler_ctx)
    processors = selection.choose_all(LOGITS_PROCESSOR, processor_ctx)
    made_attention = culprits.know(attention.record, attention.build(attention_ctx))
    made_processors = tuple(culprits.know(one.record, one.build(processor_ctx)) for one in processors)
    made_sampler = culprits.know(sampler.record, sampler.build(sampler_ctx))
    asked = (*made_processors, *((made_sampler,) if "params" in sampler.provides else ()))
    about = ModelRunnerContext(
        spec, model, None, made_attention, made_sampler, made_processors, model.device, explicit=resolved.named,
        kv_dtype=attention_ctx.kv_dtype, provides=_provided(selection), capture=capture,
        graph_sizes=attention_ctx.graph_sizes,
    )  # fmt: skip
    runner = selection.choose(RUNNER, about)
    pool = selection.choose(KV_POOL, pool_context(1, config.memory.page_size, model, spec, further, kv_dtype))
    return Chosen(
        resolved, selection, model, spec, tokenizer, made_attention, made_processors, made_sampler, asked, runner, pool,
        kv_dtype, providers, about, further, culprits, queue,
        sampling_defaults(config.sampling_defaults, model.directory),
    )  # fmt: skip


def _attention_context(
    config: EngineConfig, model: ModelContext, spec: ModelSpec, layers: tuple[LayerSpec, ...], kv_dtype: torch.dtype
) -> AttentionContext:
    return AttentionContext(
        layers=layers,
        page_size=config.memory.page_size,
        dtype=model.dtype,
        device=model.device,
        max_batch=config.scheduler.max_running_requests,
        max_context_len=spec.max_context_len,
        kv_dtype=_other_than(model, kv_dtype),
    )


def _kv_dtype(resolved: ResolvedConfig, model: ModelContext, spec: ModelSpec) -> torch.dtype:
    records = resolved.candidates[ATTENTION.name]
    able = any("kv_fp8" in resolved.provides(record) for record in records)
    able = able and not any(layer.latent for layer in spec.layers)
    return resolve_kv_dtype(resolved.engine.memory.kv_dtype, model, able=able)


def _other_than(model: ModelContext, kv_dtype: torch.dtype) -> torch.dtype | None:
    """Return the type of KV, None where it is the model's: so contexts say it."""
    return None if kv_dtype is model.dtype else kv_dtype


def _graph_sizes(resolved: ResolvedConfig, capture: GraphCapture | None) -> tuple[int, ...]:
    """Return which sizes of decode batches will be graphs: attention is built before the runner is chosen."""
    if capture is None:
        return ()
    for record in resolved.candidates[RUNNER.name]:
        if "graph" in resolved.provides(record):
            cls: type[ModelRunner] = record.load()
            return cls.graph_sizes(resolved.options(record), resolved.engine.scheduler.max_running_requests)
    return ()


def _provided(selection: Selection) -> dict[str, frozenset[str]]:
    """Return what the providers chosen so far can do, by contract: of a list, what all of it can."""
    return {
        name: frozenset.intersection(*(one.provides for one in chosen))
        for name, chosen in selection.choices.items()
        if chosen
    }


def _needs(ctx: AttentionContext) -> dict[str, str]:
    """Return what an attention backend needs for what the pool keeps. One without these capabilities reads keys and
    values in the model's type alone.
    """
    needs = {}
    if any(layer.chunked for layer in ctx.layers):
        text = "which the model's layers need, since they attend in chunks; choose another attention.use"
        needs["chunked_attention"] = text
    if any(layer.latent for layer in ctx.layers):
        needs["latent"] = "which the model's layers need, since they keep latents (MLA); choose another attention.use"
    if ctx.kv_dtype is not None:
        value = kv_dtype_name(ctx.kv_dtype)
        needs["kv_fp8"] = f"which memory.kv_dtype {value} needs; set that to auto, or choose another attention.use"
    return needs


def load_model(chosen: Chosen, family: ModelFamily, chunk: int | None, parts: Sequence[DevicePart] = ()) -> ModelRunner:
    """Read the weights, those of `parts` first, and try the network out. Prompts are computed in chunks of `chunk`
    tokens, None: at once. Raises ModelError.
    """
    know, runner = chosen.culprits.know, chosen.runner
    for part in parts:
        part.load()
    if "own_weights" in runner.provides:
        return know(runner.record, runner.build(chosen.runner_context(None, chunk)))
    (family_choice,) = chosen.selection.choices["model_family"]
    network = know(family_choice.record, family.load())
    family.probe(network, _probe(chosen, network))
    return know(runner.record, runner.build(chosen.runner_context(network, chunk)))


def pages_for(
    chosen: Chosen, runner: ModelRunner, chunk: int | None, parts: Sequence[DevicePart] = (), sharing: int = 1
) -> int:
    """Give device parts what they need of the model, and return how many pages of KV the memory that is left has room
    for. So many processes are `sharing` it. Raises OutOfMemory.
    """
    model = LoadedModel(runner.ends, runner.weights, chosen.attention, chosen.model.device, chosen.queue.bring)
    for part in parts:
        part.attach(model)
    reserved, config = sum(part.device_bytes for part in parts), chosen.resolved.engine
    room = _by_trial(chosen, runner, chunk, state_memory(parts))
    return count_pages(
        chosen.pool, config, chosen.model, chosen.spec, reserved, chosen.further, chosen.kv_dtype, room, sharing,
        chunk,
    )  # fmt: skip


def with_memory(
    chosen: Chosen,
    family: ModelFamily,
    runner: ModelRunner,
    num_pages: int,
    parts: Sequence[DevicePart] = (),
    chunk: int | None = None,
) -> Loaded:
    """Give KV so many pages. Raises OutOfMemory."""
    config, spec, further = chosen.resolved.engine, chosen.spec, chosen.further
    memory = make_memory(chosen.pool, config, chosen.model, spec, num_pages, further, chosen.kv_dtype, chunk)
    if is_eight_bit(chosen.kv_dtype):
        _set_scales(memory.pool, family)
    chosen.culprits.know(chosen.pool.record, memory.pool)
    return Loaded(runner, memory, (runner.numerics(), "".join(part.numerics() for part in parts)))


def _probe(chosen: Chosen, network: Network) -> PoolProbe:
    """Return what runs a network over paged KV in the model's own type: the question is whether that works at all."""
    page_size, attention = chosen.resolved.engine.memory.page_size, chosen.attention
    if attention.ctx.kv_dtype is not None:
        (choice,) = chosen.selection.choices[ATTENTION.name]
        attention = choice.build(replace(attention.ctx, kv_dtype=None, graph_sizes=()))

    def small_pool(num_pages: int) -> KVPool:
        return chosen.pool.build(pool_context(num_pages, page_size, chosen.model, chosen.spec))

    return PoolProbe(network, chosen.spec, attention, small_pool, page_size, chosen.model.device)


def _by_trial(
    chosen: Chosen, runner: ModelRunner, chunk: int | None, states: Mapping[str, torch.Tensor] | None
) -> int | None:
    """Return the bytes that the largest steps leave for KV; None, untried, on a CPU and where the config sizes KV."""
    config, model = chosen.resolved.engine, chosen.model
    if model.device.type != "cuda" or config.memory.max_total_tokens or config.memory.gpu_share:
        return None

    def scratch(num_pages: int) -> KVPool:
        further = chosen.further
        return chosen.pool.build(
            pool_context(num_pages, config.memory.page_size, model, chosen.spec, further, chosen.kv_dtype)
        )

    running, tokens = config.scheduler.max_running_requests, runner.prefill_graph_sizes()
    graphs = len(chosen.attention.ctx.graph_sizes) + 2 * len(tokens)  # of each prefill with and without decodes
    largest = max(tokens, default=0)
    about = (config.memory.page_size, running, chunk, chosen.spec.max_context_len, states)
    room = room_for_kv(
        CudaMeter(model.device), lambda: MemoryProfiler(runner, scratch, chosen.queue, *about), graphs, largest
    )
    torch.cuda.empty_cache()  # the pool takes segments of its own, not blocks that the profiler's steps left
    return room


def _set_scales(pool: KVPool, family: ModelFamily) -> None:
    """Have a pool of 8 bits scale as the checkpoint says. Raises ModelError for scales that cannot be."""
    scales = family.kv_scales()
    for layer_id, (k, v) in scales.items():
        pool.set_scales(layer_id, k, v)
    logger.info("8-bit KV is scaled %s", "as the checkpoint says" if scales else "by 1: the checkpoint has no scales")
