"""Assembly: from a resolved config to a scheduler that can take requests. The only place that knows all contracts."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch

from pegboard.core import __version__
from pegboard.core.engine.dtype import resolve_dtype
from pegboard.core.engine.model_probe import PoolProbe
from pegboard.core.engine.operation import Operation, RequestLog
from pegboard.core.engine.profiler import Profiler
from pegboard.core.engine.source import prepare_model
from pegboard.core.engine.view import SchedulerView
from pegboard.core.interfaces.admission_gate import AdmissionGate, AdmissionGateContext
from pegboard.core.interfaces.attention import AttentionBackend, AttentionContext
from pegboard.core.interfaces.client import ModelInfo
from pegboard.core.interfaces.errors import ConfigError, ModelError, OutOfMemory
from pegboard.core.interfaces.grammar import GrammarContext
from pegboard.core.interfaces.kv_pool import KVPool, KVPoolContext
from pegboard.core.interfaces.layers import KVKind, ModelSpec
from pegboard.core.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from pegboard.core.interfaces.model_family import ModelContext, ModelFamily
from pegboard.core.interfaces.model_runner import ModelRunner, ModelRunnerContext
from pegboard.core.interfaces.pooler import Pooler, PoolerContext
from pegboard.core.interfaces.prefix_cache import PrefixCache, PrefixCacheContext
from pegboard.core.interfaces.sampler import Sampler, SamplerContext
from pegboard.core.interfaces.schedule_policy import SchedulePolicy, SchedulePolicyContext
from pegboard.core.interfaces.token_allocator import TokenAllocator, TokenAllocatorContext
from pegboard.core.pipeline.batch import BatchBuilder
from pegboard.core.pipeline.culprits import Culprits
from pegboard.core.pipeline.executor import InlineExecutor, ThreadExecutor
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.core.pipeline.grammar.gate import GrammarGate, make_grammar_gate
from pegboard.core.pipeline.grammar.state import KINDS
from pegboard.core.pipeline.grammar.work import GrammarWork, WorkLimits
from pegboard.core.pipeline.guards import GuardedHooks
from pegboard.core.pipeline.memory import MemoryManager
from pegboard.core.pipeline.req_to_token import ReqToTokenPool
from pegboard.core.pipeline.results import ResultStage
from pegboard.core.pipeline.scheduler import Scheduler
from pegboard.core.pipeline.stages import Limits, Stages, StepHooks
from pegboard.core.pipeline.step_log import StepReport
from pegboard.core.pipeline.worker import Worker
from pegboard.core.toolkit.model.model_config import read_model_config

if TYPE_CHECKING:
    from pegboard.core.config.compose import ResolvedConfig
    from pegboard.core.config.sections import EngineConfig, SchedulerSection
    from pegboard.core.config.select import Selection
    from pegboard.core.interfaces.grammar import GrammarBackend
    from pegboard.core.interfaces.tokenizer import Tokenizer
    from pegboard.core.registry.hooks import Hooks

logger = logging.getLogger(__name__)

CPU_POOL_SHARE = 0.25
CPU_POOL_LIMIT = 8 * 2**30
GPU_POOL_SHARE = 0.85
"""What an unset `memory.max_total_tokens` takes of the memory that is free once weights are loaded."""

_GPU_CHUNKS = ((35 * 2**30, 2048), (160 * 2**30, 8192))
_CHUNK_ELSEWHERE = 4096
"""Chunk sizes by device memory, SGLang's defaults; on a CPU smaller, since a chunk delays every running request."""
_CHUNK_CPU = 512


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
    grammar_gate: GrammarGate | None = None

    def prepare_memory(self, seconds: float) -> None:
        """Provide for the KV pool's memory, for about `seconds` at most: before the first request, or not at all."""
        if seconds <= 0:
            return
        started = time.monotonic()
        with torch.inference_mode():
            slots = self.pool.prepare(seconds)
        took, all_slots = time.monotonic() - started, self.pool.num_slots
        if took > 0.5 or slots < all_slots:
            logger.info("memory for %d of %d tokens of KV is prepared, in %.1f s", slots, all_slots, took)

    def close(self) -> None:
        """End the helper processes and threads. Nothing may be running any more."""
        self.scheduler.stages.executor.close()
        self.scheduler.stages.results.work.close()
        if self.grammar_gate is not None:
            self.grammar_gate.close()


def build_scheduler(resolved: ResolvedConfig) -> BuiltScheduler:
    """Prepare the model, choose providers, load weights, size memory, join the stages.

    Raises ConfigError, PluginError, ModelError or OutOfMemory with a message for the operator.
    """
    from pegboard.core.config.early import ENGINE_SIDE, import_chosen
    from pegboard.core.config.select import Selection
    from pegboard.core.registry.hooks import Hooks

    config = resolved.engine
    hooks = Hooks.load(resolved.registry)
    import_chosen(resolved, ENGINE_SIDE)
    hooks.call.configure(config=config)
    selection = Selection(resolved)
    started = time.monotonic()
    prepared = prepare_model(resolved, selection)
    model = _model_context(config, prepared.directory)
    family_choice = selection.choose("model_family", model)
    family = cast(ModelFamily, family_choice.build(model))
    spec = _checked(family.spec, family_choice.name)
    # Some models name their end only in the tokenizer's files.
    spec = replace(spec, eos_token_ids=_possible(spec.eos_token_ids | prepared.tokenizer.eos_token_ids, spec))
    parts = _Parts(resolved, selection, model, spec, prepared.tokenizer)
    with torch.inference_mode():
        runner = parts.load(family)
    scheduler, worker = parts.scheduler(runner, prepared.tokenizer, hooks)
    info = parts.info(scheduler)
    view = SchedulerView(scheduler, hooks)
    logger.info("ready after %.1f s: %s", time.monotonic() - started, ", ".join(_choices(selection)))
    return BuiltScheduler(
        scheduler=scheduler,
        info=info,
        directory=prepared.directory,
        tokenizer=prepared.tokenizer,
        hooks=hooks,
        worker=worker,
        runner=runner,
        pool=parts.pool,
        view=view,
        grammar_gate=parts.grammar_gate,
    )


def _choices(selection: Selection) -> list[str]:
    return [f"{contract} {choice.name}" for contract, chosen in selection.choices.items() for choice in chosen]


def _model_context(config: EngineConfig, directory: Path) -> ModelContext:
    hf_config = read_model_config(directory)
    device = _device(config.model.device)
    return ModelContext(
        directory=directory,
        hf_config=hf_config,
        dtype=resolve_dtype(config.model.dtype, directory, hf_config, device),
        device=device,
        context_length=config.model.context_length,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"model.device: {name!r}, but torch {torch.__version__} finds no GPU here; use 'cpu' or 'auto'"
        )
    return device


def _checked(spec: ModelSpec, family: str) -> ModelSpec:
    kinds = [group.kind for group in spec.kv_groups]
    if kinds != [KVKind.FULL]:
        names = ", ".join(kind.value for kind in kinds) or "none"
        raise ModelError(
            f"{spec.architecture}: the model family {family!r} declares the KV groups [{names}]; "
            "this version serves models with one group of full attention only"
        )
    return spec


def _possible(eos_token_ids: frozenset[int], spec: ModelSpec) -> frozenset[int]:
    """Those that the model can choose."""
    found = frozenset(token for token in eos_token_ids if 0 <= token < spec.vocab_size)
    if found != eos_token_ids:
        others = ", ".join(map(str, sorted(eos_token_ids - found)))
        logger.warning(
            "eos_token_id: %s is not among the model's %d tokens, so it is left out", others, spec.vocab_size
        )
    return found


class _Parts:
    """The build's intermediate results, in the order in which they become known."""

    def __init__(
        self,
        resolved: ResolvedConfig,
        selection: Selection,
        model: ModelContext,
        spec: ModelSpec,
        tokenizer: Tokenizer,
    ) -> None:
        self.resolved = resolved
        self.tokenizer = tokenizer
        self.config = resolved.engine
        self.selection = selection
        self.model = model
        self.spec = spec
        self.device = model.device
        self.page_size = self.config.memory.page_size
        self.culprits = Culprits()
        self.grammar_kinds: tuple[str, ...] = ()
        self.grammar_gate: GrammarGate | None = None

    def load(self, family: ModelFamily) -> ModelRunner:
        """Attention, sampler and processors first, so that a wrong choice is known before weights are read."""
        choose, know = self.selection.choose, self.culprits.know
        max_rows = self.config.scheduler.max_running_requests
        attention_ctx = AttentionContext(
            layers=self.spec.layers,
            page_size=self.page_size,
            dtype=self.model.dtype,
            device=self.device,
            max_batch=max_rows,
            max_context_len=self.spec.max_context_len,
        )
        attention = choose("attention", attention_ctx)
        sampler_ctx = SamplerContext(self.spec.vocab_size, self.device)
        sampler = choose("sampler", sampler_ctx)
        processor_ctx = LogitsProcessorContext(
            self.spec.vocab_size, self.device, self.spec.eos_token_ids, self.tokenizer
        )
        processors = self.selection.choose_all("logits_processor", processor_ctx)
        self.attention = cast(AttentionBackend, know(attention.record, attention.build(attention_ctx)))
        self.processors = tuple(
            cast(LogitsProcessor, know(choice.record, choice.build(processor_ctx))) for choice in processors
        )
        sampler_made = cast(Sampler, know(sampler.record, sampler.build(sampler_ctx)))
        self.asked = (*self.processors, *((sampler_made,) if "params" in sampler.provides else ()))

        def runner_context(network: Any) -> ModelRunnerContext:
            return ModelRunnerContext(
                self.spec,
                self.model,
                network,
                self.attention,
                sampler_made,
                self.processors,
                self.device,
                explicit=self.resolved.named,
            )

        runner = choose("runner", runner_context(None))
        if self.config.scheduler.split_prefill_layers and "split_prefill" not in runner.provides:
            raise ConfigError(
                f"scheduler.split_prefill_layers: the runner {runner.name!r} cannot pause between layers (it lacks the "
                "capability split_prefill); set it to 0, or choose another runner.use"
            )
        self.prefers_mixed = "prefers_mixed" in runner.provides
        self.pool_choice = choose("kv_pool", self._pool_context(num_pages=1))
        if "own_weights" in runner.provides:
            built = know(runner.record, runner.build(runner_context(None)))
            self.pool = self._make_pool()
            return cast(ModelRunner, built)
        network = know(self.selection.choices["model_family"][0].record, family.load())
        family.probe(
            network, PoolProbe(network, self.spec, self.attention, self._small_pool, self.page_size, self.device)
        )
        self.pool = self._make_pool()
        return cast(ModelRunner, know(runner.record, runner.build(runner_context(network))))

    def scheduler(self, runner: ModelRunner, tokenizer: Tokenizer, hooks: Hooks) -> tuple[Scheduler, Worker]:
        """Memory and stages around a loaded runner."""
        config = self._scheduler_config()
        choose = self.selection.choose
        allocator_ctx = TokenAllocatorContext(self.num_pages, self.page_size)
        allocator = cast(TokenAllocator, choose("token_allocator", allocator_ctx).build(allocator_ctx))
        cache_ctx = PrefixCacheContext(allocator, self.page_size)
        cache = cast(PrefixCache, self._made("prefix_cache", cache_ctx))
        policy_ctx = SchedulePolicyContext(cache, config.seed)
        policy = cast(SchedulePolicy, self._made("schedule_policy", policy_ctx))
        rows = self._make_rows()
        memory = MemoryManager(rows, allocator, cache)
        memory.cache_name = self.culprits.name(cache)
        gate_ctx = AdmissionGateContext()
        gates = [
            *self._grammar_gate(tokenizer, gate_ctx),
            *(
                (choice.name, cast(AdmissionGate, choice.build(gate_ctx)))
                for choice in self.selection.choose_all("admission_gate", gate_ctx)
            ),
        ]
        pooler = self._pooler(runner)
        worker = Worker(
            runner,
            self.attention,
            self.pool,
            rows,
            self.device,
            before=GuardedHooks("before_forward", hooks.freeze("before_forward")),
            after=GuardedHooks("after_forward", hooks.freeze("after_forward")),
            pooler=pooler,
        )
        overlap = config.loop == "overlap"
        request_log = RequestLog(on=self.config.log_requests)
        stages = Stages(
            memory,
            policy,
            BatchBuilder(memory, self.asked, self.spec.vocab_size, pooler),
            ResultStage(
                cast(Any, tokenizer),
                self.spec.eos_token_ids,
                pooler,
                jump_ahead=self.config.grammar.jump_ahead,
                work=GrammarWork(self._work_limits()),
            ),
            ThreadExecutor(worker.launch, worker.again, worker.healthy)
            if overlap
            else InlineExecutor(worker.run, worker.again, worker.healthy),
            gates=GateKeeper(gates, time.monotonic) if gates else None,
            pooler=pooler,
            report=StepReport(config.decode_log_interval, total_tokens=allocator.total_tokens),
            culprits=self.culprits,
            hooks=StepHooks(
                batch_scheduled=hooks.freeze("batch_scheduled"),
                batch_committed=hooks.freeze("batch_committed"),
                requests_finished=(*hooks.freeze("requests_finished"), request_log),
                idle=(hooks.call.idle,),
            ),
        )
        limits = Limits(self.max_context_len, self._chunk_size(), len(self.spec.layers), self.spec.eos_token_ids)
        scheduler = Scheduler(config, stages, limits)
        profiler = Profiler(self.config.server.profile_dir, scheduler.set_on_step)
        scheduler.controls.update({**profiler.controls(), **Operation(scheduler, request_log).controls()})
        return scheduler, worker

    def _made(self, contract: str, ctx: object) -> Any:
        """What the chosen provider builds, known by its name, should it raise."""
        choice = self.selection.choose(contract, ctx)
        return self.culprits.know(choice.record, choice.build(ctx))

    def _grammar_gate(self, tokenizer: Tokenizer, ctx: AdmissionGateContext) -> list[tuple[str, AdmissionGate]]:
        """In front of all others, since what it refuses need not pass them. None where there are no grammars."""
        grammar_ctx = GrammarContext(self.model.directory, tokenizer, self.spec.vocab_size, self.spec.eos_token_ids)
        choice = self.selection.choose("grammar", grammar_ctx)
        self.grammar_kinds = tuple(kind for kind in KINDS if kind in choice.provides)
        if not self.grammar_kinds:
            return []
        backend: GrammarBackend = choice.build(grammar_ctx)
        self.grammar_gate = make_grammar_gate(
            choice.record, backend, choice.options, grammar_ctx, self.config.grammar, ctx
        )
        return [("grammar", self.grammar_gate)]

    def _work_limits(self) -> WorkLimits:
        config = self.config.grammar
        return WorkLimits(config.step_seconds, config.work_seconds, config.work_seconds_earned)

    def _pooler(self, runner: ModelRunner) -> Pooler | None:
        """None where the runner gives no hidden states to pool."""
        if "hidden_states" not in self._capabilities:
            return None
        ctx = PoolerContext(self.model.directory, self.spec.hidden_size)
        return cast(Pooler, self._made("pooler", ctx))

    @property
    def _capabilities(self) -> frozenset[str]:
        """Of the runner that was chosen."""
        (choice,) = self.selection.choices["runner"]
        return choice.provides

    def _features(self, scheduler: Scheduler) -> tuple[str, ...]:
        """What requests may ask of this engine; see ModelInfo."""
        provides = self._capabilities
        found = ["input_logprobs"] if "input_logprobs" in provides else []
        if "hidden_states" in provides and self.config.model.hidden_states:
            found.append("hidden_states")
        if scheduler.stages.pooler is not None:
            found.append("embeddings")
        found += [f"grammar.{kind}" for kind in self.grammar_kinds]
        for contract in ("logits_processor", "sampler"):
            chosen = self.selection.choices.get(contract, ())
            found += [f"{contract}.{one.name}" for one in chosen if "params" in one.provides]
        return tuple(found)

    def info(self, scheduler: Scheduler) -> ModelInfo:
        """What the API process may tell of the model."""
        model, hf_config = self.config.model, self.model.hf_config
        served_name, *other_names = dict.fromkeys(model.served_name or [model.path.rstrip("/").rsplit("/", 1)[-1]])
        return ModelInfo(
            served_name=served_name,
            other_names=tuple(other_names),
            path=model.path,
            architecture=self.spec.architecture,
            architectures=tuple(hf_config.get("architectures") or ()),
            model_type=str(hf_config.get("model_type") or ""),
            max_context_len=scheduler.max_context_len,
            vocab_size=self.spec.vocab_size,
            max_total_tokens=scheduler.stages.memory.total_tokens,
            dtype=str(self.model.dtype).removeprefix("torch."),
            version=__version__,
            created=int(time.time()),
            providers={contract: [c.name for c in chosen] for contract, chosen in self.selection.choices.items()},
            features=self._features(scheduler),
            hidden_size=self.spec.hidden_size,
            max_grammar_bytes=self.config.grammar.max_source_bytes,
        )

    def _pool_context(self, num_pages: int) -> KVPoolContext:
        return KVPoolContext(num_pages, self.page_size, self.spec.layers, self.model.dtype, self.device)

    def _small_pool(self, num_pages: int) -> KVPool:
        return cast(KVPool, self.pool_choice.build(self._pool_context(num_pages)))

    def _make_pool(self) -> KVPool:
        """Size the pool by the config or by what is free now, and cap the context by it: every request must fit
        alone.
        """
        per_token = cast(Any, self.pool_choice.cls).bytes_per_token(self.spec.layers, self.model.dtype)
        free = _free_bytes(self.device)
        wanted = self.config.memory.max_total_tokens
        tokens = wanted or int(_pool_bytes(self.device, free) // per_token)
        self.num_pages = tokens // self.page_size
        if self.num_pages < 1:
            raise ConfigError(
                f"memory.max_total_tokens: {tokens} tokens hold no page of {self.page_size} (memory.page_size)"
            )
        if self.num_pages * self.page_size * per_token > free:
            raise OutOfMemory(
                f"a KV pool of {tokens} tokens takes {tokens * per_token / 2**30:.1f} GiB, but only "
                f"{free / 2**30:.1f} GiB are free on {self.device}; lower memory.max_total_tokens to at most "
                f"{int(free // per_token)}"
            )
        self.max_context_len = min(self.spec.max_context_len, self.num_pages * self.page_size)
        if self.max_context_len < self.spec.max_context_len:
            logger.warning(
                "the KV pool holds %d tokens, so prompt and output together are limited to that, not to the model's %d",
                self.max_context_len,
                self.spec.max_context_len,
            )
        pool = self.pool_choice.build(self._pool_context(self.num_pages))
        return cast(KVPool, self.culprits.know(self.pool_choice.record, pool))

    def _make_rows(self) -> ReqToTokenPool:
        count, width = self.config.scheduler.max_running_requests, self.max_context_len
        needed, free = (count + 1) * width * 4, _free_bytes(self.device)
        if needed > free:
            raise OutOfMemory(
                f"scheduler.max_running_requests: a table of {count} requests with {width} tokens each takes "
                f"{needed / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are free on {self.device}; lower it"
            )
        mirrored = self.device.type != "cpu" or self.config.scheduler.loop == "overlap"
        return ReqToTokenPool(count, width, self.page_size, mirrored=mirrored)

    def _scheduler_config(self) -> SchedulerSection:
        config = self.config.scheduler
        if config.mixed_chunk is not None or config.split_prefill_layers or not self.prefers_mixed:
            return config
        logger.info("scheduler.mixed_chunk: on, automatic: the runner prefers it")
        return config.model_copy(update={"mixed_chunk": True})

    def _chunk_size(self) -> int | None:
        size = self.config.scheduler.chunked_prefill_size
        if size == 0:
            return None
        if size is None:
            size = max(_default_chunk(self.device), self.page_size)
        return size


def _default_chunk(device: torch.device) -> int:
    if device.type != "cuda":
        return _CHUNK_CPU
    total = torch.cuda.get_device_properties(device).total_memory
    return next((size for below, size in _GPU_CHUNKS if total < below), _CHUNK_ELSEWHERE)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _pool_bytes(device: torch.device, free: int) -> float:
    if device.type == "cuda":
        return free * GPU_POOL_SHARE
    return min(free * CPU_POOL_SHARE, CPU_POOL_LIMIT)
