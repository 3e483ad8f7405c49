"""Assembly: from a resolved config to a scheduler that can take requests, by all contracts of the scheduler's side."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from pegboard.core.engine.choose import choose_providers, load_model, pages_for, with_memory
from pegboard.core.engine.device import device_of, executor_of, loop_of, stage_parts
from pegboard.core.engine.followers import followers_of
from pegboard.core.engine.gates import build_gates
from pegboard.core.engine.memory_services import memory_services
from pegboard.core.engine.model_info import model_info
from pegboard.core.engine.reserving import Providers, services
from pegboard.core.engine.sizing import make_rows
from pegboard.core.engine.source import prepare_model
from pegboard.core.engine.stages import StageBuilder
from pegboard.core.engine.view import SchedulerView
from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.client import ModelInfo
from pegboard.core.interfaces.contract import Contract, Ctx, T
from pegboard.core.interfaces.contracts import (
    ATTENTION,
    LOGITS_PROCESSOR,
    MODEL_FAMILY,
    PREFIX_CACHE,
    SCHEDULE_POLICY,
    TOKEN_ALLOCATOR,
)
from pegboard.core.interfaces.errors import ModelError
from pegboard.core.interfaces.kv_pool import KVPool
from pegboard.core.interfaces.layers import KVKind, ModelSpec
from pegboard.core.interfaces.model_family import ModelContext
from pegboard.core.interfaces.model_runner import ModelRunner
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
from pegboard.core.interfaces.schedule_policy import SchedulePolicyContext
from pegboard.core.interfaces.token_allocator import TokenAllocator, TokenAllocatorContext
from pegboard.core.pipeline.batch import BatchBuilder
from pegboard.core.pipeline.components import Components, Limits, StepHooks
from pegboard.core.pipeline.guards import GuardedHooks
from pegboard.core.pipeline.memory import MemoryManager
from pegboard.core.pipeline.results import ResultProcessor
from pegboard.core.pipeline.scheduler import Scheduler
from pegboard.core.pipeline.shared import CommonPrefix
from pegboard.core.pipeline.unsampled import Unsampled
from pegboard.core.worker.device_parts import state_memory
from pegboard.core.worker.worker import Worker
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.model.dtypes import resolve_dtype
from pegboard.toolkit.model.model_config import read_model_config
from pegboard.toolkit.system.culprits import Culprits
from pegboard.toolkit.system.step_report import StepReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.config.sections import EngineConfig, SchedulerSection
    from pegboard.core.config.select import Selection
    from pegboard.core.engine.choose import Chosen, Loaded
    from pegboard.core.interfaces.followers import Followers
    from pegboard.core.interfaces.logits_processor import LogitsProcessor
    from pegboard.core.interfaces.model_family import ModelFamily
    from pegboard.core.interfaces.sampler import Sampler
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.core.registry.hooks import Hooks

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class BuiltScheduler:
    """A scheduler with everything that its owner has to know or to close."""

    scheduler: Scheduler
    info: ModelInfo
    directory: Path
    tokenizer: Tokenizer
    hooks: Hooks
    worker: Worker
    runner: ModelRunner
    pool: KVPool
    view: SchedulerView

    def prepare_memory(self, seconds: float) -> None:
        """Get KV's memory from the system, on the device and beyond, for about `seconds`, before the first request."""
        if seconds <= 0:
            return
        started = time.monotonic()
        with torch.inference_mode():
            ready, wanted = self.pool.prepare(seconds), self.pool.num_slots
            left = max(0.0, seconds - (time.monotonic() - started))
            beyond, of_beyond = self.scheduler.components.memory.cache.prepare(left)
            ready, wanted = ready + beyond, wanted + of_beyond
        took = time.monotonic() - started
        if took > 0.5 or ready < wanted:
            logger.info("memory for %d of %d tokens of KV is prepared, in %.1f s", ready, wanted, took)

    def close(self) -> None:
        """End the helper processes and threads. Nothing may be running any more."""
        components = self.scheduler.components
        components.executor.close()
        components.memory.cache.close()
        if components.gates is not None:
            components.gates.close()


def build_scheduler(resolved: ResolvedConfig, scratch: Path) -> BuiltScheduler:
    """Prepare the model, choose providers, load weights, size memory, join the components. `scratch` is a directory
    that this process shares with that of the API.

    Raises ConfigError, PluginError, ModelError or OutOfMemory with a message for the operator.
    """
    from pegboard.core.registry.hooks import Hooks

    hooks = Hooks.load(resolved.registry, resolved.plugin_options)
    started = time.monotonic()
    chosen, family = choose(resolved, hooks)
    parts = StageBuilder(chosen, hooks, scratch)
    followers = followers_of(chosen, hooks, parts, scratch)
    try:
        if followers is not None:
            followers.start()
        with torch.inference_mode():
            runner = load_model(chosen, family, parts.chunk_size, parts.parts)
            # What is free is known once all have read their weights.
            room, sharing = (None, 1) if followers is None else (followers.room(), followers.sharing)
            own = pages_for(chosen, runner, parts.chunk_size, parts.parts, sharing)
            pages = own if room is None else min(own, room)
            loaded = with_memory(chosen, family, runner, pages, parts.parts, parts.chunk_size)
        built = _join(chosen, loaded, hooks, parts, followers)
    except BaseException:
        if followers is not None:
            followers.close()
        raise
    logger.info("ready after %.1f s: %s", time.monotonic() - started, ", ".join(_choices(chosen.selection)))
    return built


def choose(
    resolved: ResolvedConfig, hooks: Hooks, given: Mapping[str, object] = MappingProxyType({})
) -> tuple[Chosen, ModelFamily]:
    """Prepare the model and choose providers. No weights are read. Some services for the model may be `given`.
    Raises as `build_scheduler` does.
    """
    from pegboard.core.config.early import import_chosen, on_engine_side
    from pegboard.core.config.select import Selection

    config = resolved.engine
    import_chosen(resolved, on_engine_side)
    hooks.call.configure(config=config, origins=resolved.origins)
    selection = Selection(resolved)
    prepared = prepare_model(resolved, selection)
    model, providers = _model_context(config, prepared.directory), Providers(selection, Culprits())
    model, family, spec = choose_family(selection, hooks, replace(model, services=given), providers)
    # Some models name their end only in the tokenizer's files.
    spec = replace(spec, eos_token_ids=_possible(spec.eos_token_ids | prepared.tokenizer.eos_token_ids, spec))
    chosen = choose_providers(resolved, selection, model, spec, prepared.tokenizer, hooks, providers)
    for plugin, made in hooks.built:
        chosen.culprits.know_hooks(plugin.plugin.name, str(plugin.origin), made)
    return chosen, family


def choose_family(
    selection: Selection, hooks: Hooks, model: ModelContext, providers: Providers
) -> tuple[ModelContext, ModelFamily, ModelSpec]:
    """Let plugins look at the model, and choose its family; what they bring is added to the services that are given.
    Nothing of it needs the device.
    """
    brought = services(hooks, "model_services", model=model, chooser=providers)
    model = replace(model, services={**brought, **model.services})
    choice = selection.choose(MODEL_FAMILY, model)
    family = choice.build(model)
    return model, family, _checked(family.spec, choice.name)


def _choices(selection: Selection) -> list[str]:
    return [f"{contract} {choice.name}" for contract, chosen in selection.choices.items() for choice in chosen]


def _model_context(config: EngineConfig, directory: Path) -> ModelContext:
    hf_config = read_model_config(directory)
    device = device_of(config.model.device)
    return ModelContext(
        directory=directory,
        hf_config=hf_config,
        dtype=resolve_dtype(config.model.dtype, directory, hf_config, device),
        device=device,
        context_length=config.model.context_length,
    )


def _checked(spec: ModelSpec, family: str) -> ModelSpec:
    kinds = [group.kind for group in spec.kv_groups]
    if kinds[:1] != [KVKind.FULL] or KVKind.FULL in kinds[1:]:
        names = ", ".join(kind.value for kind in kinds) or "none"
        raise ModelError(
            f"{spec.architecture}: the model family {family!r} declares the KV groups [{names}]; "
            "the first one has to be full, and all others windows"
        )
    return spec


def _possible(eos_token_ids: frozenset[int], spec: ModelSpec) -> frozenset[int]:
    """Return those that the model can choose."""
    found = frozenset(token for token in eos_token_ids if 0 <= token < spec.vocab_size)
    if found != eos_token_ids:
        others = ", ".join(map(str, sorted(eos_token_ids - found)))
        logger.warning(
            "eos_token_id: %s is not among the model's %d tokens, so it is left out", others, spec.vocab_size
        )
    return found


def _join(
    chosen: Chosen, loaded: Loaded, hooks: Hooks, parts: StageBuilder, followers: Followers | None
) -> BuiltScheduler:
    """Build the components around a loaded runner, and the scheduler of them."""
    config = chosen.resolved.engine
    lanes = 1 if followers is None else followers.lanes
    settings = _scheduler_settings(chosen, lanes, splits=parts.splits)
    allocator, cache = _cache(chosen, loaded, hooks)
    parts.check_loader(cache)
    rows = make_rows(config, chosen.model.device, loaded.memory.max_context_len, mirrored=followers is not None)
    memory = MemoryManager(rows, allocator, cache)
    memory.guarded.name = chosen.culprits.name(cache)
    report = StepReport(settings.decode_log_interval, total_tokens=allocator.total_tokens)
    named = {stage.name: stage for stage in parts.points.stages}
    gate_ctx = AdmissionGateContext(cache=cache, prefill_speed=report.prefill_speed, stages=named)
    gates = build_gates(chosen, loaded, parts.points, gate_ctx)
    worker = _worker(chosen, loaded, rows, hooks, parts)
    stages = stage_parts(chosen, worker, loaded.memory.pool)
    executor = executor_of(settings.loop, worker, stages, chosen.model.device, lanes)
    if followers is not None:
        executor = followers.lead(executor, loaded.memory.num_pages, (rows.host.shape[0], rows.width))
    components = Components(
        memory,
        _made(chosen, SCHEDULE_POLICY, SchedulePolicyContext(cache, settings.seed)),
        _builder(chosen, memory, parts),
        ResultProcessor(chosen.tokenizer, chosen.spec.eos_token_ids, parts.points),
        executor,
        gates=gates,
        points=parts.points,
        report=report,
        culprits=chosen.culprits,
        hooks=_step_hooks(hooks),
        runner_figures=loaded.runner.figures,
        unsampled=Unsampled(chosen.processors, chosen.culprits, executor),
    )
    limits = Limits(loaded.memory.max_context_len, parts.chunk_size, chosen.spec.eos_token_ids)
    return _built(chosen, loaded, hooks, Scheduler(settings, components, limits), worker)


def _built(chosen: Chosen, loaded: Loaded, hooks: Hooks, scheduler: Scheduler, worker: Worker) -> BuiltScheduler:
    return BuiltScheduler(
        scheduler=scheduler,
        info=model_info(chosen, scheduler),
        directory=chosen.model.directory,
        tokenizer=chosen.tokenizer,
        hooks=hooks,
        worker=worker,
        runner=loaded.runner,
        pool=loaded.memory.pool,
        view=SchedulerView(scheduler, hooks),
    )


def _made(chosen: Chosen, contract: Contract[T, Ctx], ctx: Ctx) -> T:
    """Return what the chosen provider builds, known by its name, should it raise."""
    choice = chosen.selection.choose(contract, ctx)
    return chosen.culprits.know(choice.record, choice.build(ctx))


def _cache(chosen: Chosen, loaded: Loaded, hooks: Hooks) -> tuple[TokenAllocator, PrefixCache]:
    page_size = chosen.resolved.engine.memory.page_size
    allocator_ctx = TokenAllocatorContext(loaded.memory.num_pages, page_size)
    allocator = chosen.selection.choose(TOKEN_ALLOCATOR, allocator_ctx).build(allocator_ctx)
    ctx = PrefixCacheContext(allocator, page_size)
    services = memory_services(chosen, loaded, hooks, chosen.selection.choose(PREFIX_CACHE, ctx))
    return allocator, _made(chosen, PREFIX_CACHE, replace(ctx, services=services))


def _worker(chosen: Chosen, loaded: Loaded, rows: ReqToTokenPool, hooks: Hooks, parts: StageBuilder) -> Worker:
    worker = Worker(
        loaded.runner,
        chosen.attention,
        loaded.memory.pool,
        rows,
        chosen.queue,
        before=GuardedHooks("before_forward", hooks.freeze("before_forward")),
        after=GuardedHooks("after_forward", hooks.freeze("after_forward")),
        parts=parts.parts,
    )
    loaded.runner.start(loaded.memory.pool, *worker.batches.tables, states=state_memory(parts.parts))
    return worker


def _builder(chosen: Chosen, memory: MemoryManager, parts: StageBuilder) -> BatchBuilder:
    shared = _shared(chosen, memory.rows)
    vocab_size = chosen.spec.vocab_size
    return BatchBuilder(memory, chosen.asked, vocab_size, _alone(chosen), shared, points=parts.points)


def _alone(chosen: Chosen) -> list[LogitsProcessor | Sampler]:
    """Return what takes tokens ahead for output: processors that do not say otherwise, and what a sampler remembers."""
    processors = zip(chosen.selection.choices[LOGITS_PROCESSOR.name], chosen.processors, strict=True)
    found: list[LogitsProcessor | Sampler] = [made for one, made in processors if "tokens_ahead" not in one.provides]
    return [*found, *(made for made in chosen.asked if made is chosen.sampler)]


def _shared(chosen: Chosen, rows: ReqToTokenPool) -> CommonPrefix | None:
    """Return what finds KV that all requests share, where attention computes that once."""
    (attention,) = chosen.selection.choices[ATTENTION.name]
    if "own_attention" in chosen.runner.provides or "shared_prefix" not in attention.provides:
        return None
    return CommonPrefix(rows, chosen.resolved.engine.memory.page_size, chosen.attention.prefix_pays_from)


def _step_hooks(hooks: Hooks) -> StepHooks:
    return StepHooks(
        batch_scheduled=hooks.freeze("batch_scheduled"),
        batch_committed=hooks.freeze("batch_committed"),
        requests_finished=hooks.freeze("requests_finished"),
        idle=(hooks.call.idle,),
    )


def _scheduler_settings(chosen: Chosen, lanes: int, *, splits: bool) -> SchedulerSection:
    settings = chosen.resolved.engine.scheduler
    settings = settings.model_copy(update={"loop": loop_of(settings.loop, chosen.model.device, lanes)})
    gpu = chosen.model.device.type == "cuda"
    if settings.mixed_chunk is not None or splits or not (gpu or "prefers_mixed" in chosen.runner.provides):
        return settings
    logger.info("scheduler.mixed_chunk: on, automatic: %s", "on a GPU" if gpu else "the runner prefers it")
    return settings.model_copy(update={"mixed_chunk": True})
