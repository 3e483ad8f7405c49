"""A scheduler as the config describes it, around a modelled device. No model is read and nothing of torch is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pegboard.core.config.compose import ResolvedConfig, compose
from pegboard.core.config.select import Selection
from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.contracts import ADMISSION_GATE, PREFIX_CACHE, SCHEDULE_POLICY, TOKEN_ALLOCATOR
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.prefix_cache import PrefixCacheContext
from pegboard.core.interfaces.schedule_policy import SchedulePolicyContext
from pegboard.core.interfaces.token_allocator import TokenAllocatorContext
from pegboard.core.pipeline.batch import BatchBuilder
from pegboard.core.pipeline.components import Components, Limits, StepHooks
from pegboard.core.pipeline.executor import LocalExecutor
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.core.pipeline.memory import MemoryManager
from pegboard.core.pipeline.points import Points
from pegboard.core.pipeline.results import ResultProcessor
from pegboard.core.pipeline.scheduler import Scheduler
from pegboard.toolkit.cache.req_to_token import ReqToTokenPool
from pegboard.toolkit.system.step_report import StepReport

if TYPE_CHECKING:
    from pegboard.core.config.sections import EngineConfig
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.stage import Stage
    from pegboard.core.pipeline.executor import Launch, RunStage
    from pegboard.tools.lab.tiers import LabTiers

DEFAULT_TOKENS = 200_000
"""KV memory where `memory.max_total_tokens` is unset: there is no device whose memory could say."""
DEFAULT_CONTEXT = 32_768
DEFAULT_CHUNK = 2048
NO_MODEL: Mapping[str, Any] = {"model": {"path": "lab"}}
EOS = 2


def resolve(files: Sequence[str | Path], overrides: Sequence[str]) -> ResolvedConfig:
    """Return the config of a server, or of a part of one: the model is not read, so none need be named."""
    return compose(files, overrides=overrides, data=dict(NO_MODEL))


def assemble(
    resolved: ResolvedConfig,
    launch: Launch,
    clock: Clock,
    hooks: StepHooks,
    vocab_size: int,
    *,
    joining: Sequence[Stage] = (),
    runs: Mapping[str, RunStage] = MappingProxyType({}),
    tiers: LabTiers | None = None,
) -> Scheduler:
    """Return a scheduler around `launch` with the stages `joining`, whose work `runs` does, by their names, and with a
    mover of `tiers`. Raise ConfigError where the config asks for what the lab cannot do.
    """
    config = resolved.engine
    _refuse_overlap(config)
    selection, page_size = Selection(resolved), config.memory.page_size
    pages = (config.memory.max_total_tokens or DEFAULT_TOKENS) // page_size
    context = min(config.model.context_length or DEFAULT_CONTEXT, pages * page_size)
    memory = _memory(selection, context, TokenAllocatorContext(pages, page_size), tiers, clock)
    policy_ctx = SchedulePolicyContext(memory.cache, config.scheduler.seed, clock)
    report = StepReport(0, clock, memory.total_tokens)
    points = Points(joining)
    components = Components(
        memory,
        selection.choose(SCHEDULE_POLICY, policy_ctx).build(policy_ctx),
        BatchBuilder(memory, (), vocab_size, points=points),
        ResultProcessor(None, {EOS}, points=points),
        LocalExecutor(launch, stages=runs),
        gates=_gates(selection, AdmissionGateContext(clock, memory.cache, report.prefill_speed)),
        report=report,
        hooks=hooks,
        points=points,
    )
    limits = Limits(context, chunk_of(config), eos_ids=frozenset({EOS}))
    return Scheduler(config.scheduler, components, limits, clock=clock)


def _refuse_overlap(config: EngineConfig) -> None:
    """Raise ConfigError where the config asks for the overlap loop."""
    if config.scheduler.loop == "overlap":
        raise ConfigError(
            "scheduler.loop: the lab runs one step after the other; use 'normal', with a cost model whose overhead is "
            "what the overlap loop leaves of it"
        )


def chunk_of(config: EngineConfig) -> int | None:
    """Return the tokens of a chunk; None where prompts are not cut."""
    chunk = config.scheduler.chunked_prefill_size
    return None if chunk == 0 else chunk or max(DEFAULT_CHUNK, config.memory.page_size)


def _memory(
    selection: Selection, context: int, ctx: TokenAllocatorContext, tiers: LabTiers | None, clock: Clock
) -> MemoryManager:
    """Build the rows, the allocator and the prefix cache that the config chooses."""
    resolved = selection.resolved
    rows = ReqToTokenPool(resolved.engine.scheduler.max_running_requests, context, ctx.page_size)
    allocator = selection.choose(TOKEN_ALLOCATOR, ctx).build(ctx)
    cache_ctx = PrefixCacheContext(allocator, ctx.page_size, clock=clock)
    choice = selection.choose(PREFIX_CACHE, cache_ctx)
    if tiers is not None:
        cache_ctx = replace(cache_ctx, services=tiers.build(resolved, choice, ctx.num_pages))
    return MemoryManager(rows, allocator, choice.build(cache_ctx))


def _gates(selection: Selection, ctx: AdmissionGateContext) -> GateKeeper | None:
    """Build the gates that the config lists; None where there are none."""
    gates = [(choice.name, choice.build(ctx)) for choice in selection.choose_all(ADMISSION_GATE, ctx)]
    return GateKeeper(gates, ctx.clock) if gates else None
