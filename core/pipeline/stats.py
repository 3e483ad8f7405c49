"""Stats: the scheduler in figures, for `/server_info`, for metrics and for the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pegboard.core.pipeline.reports import flat

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import ScheduleBatch
    from pegboard.core.pipeline.arrivals import QueueBounds
    from pegboard.core.pipeline.components import Components
    from pegboard.core.pipeline.counters import Counters
    from pegboard.core.pipeline.guards import GuardedHooks
    from pegboard.core.pipeline.planner import Planner
    from pegboard.toolkit.system.step_report import StepReport

logger = logging.getLogger(__name__)


class Stats:
    """Reads the components; changes nothing."""

    def __init__(
        self,
        components: Components,
        planner: Planner,
        hooks: tuple[GuardedHooks, ...],
        bounds: QueueBounds,
        counters: Counters,
    ) -> None:
        self._components = components
        self._planner = planner
        self._hooks = hooks
        self._bounds = bounds
        self._counters = counters
        self._cached_told = 0

    def info(self, *, paused: bool) -> dict[str, object]:
        """Return counters and the state of queues and memory, as plain values."""
        memory, gates, failures = self._components.memory, self._components.gates, self._plugin_failures()
        stages = self._components.points.reports.by_stage()
        return {
            **self._counters.to_dict(),
            "paused": paused,
            "waiting_requests": len(self._planner.waiting),
            "running_requests": self._running_requests,
            "blocked_requests": 0 if gates is None else gates.blocked,
            "held_requests": 0 if gates is None else gates.held,
            "seated_requests": len(self._planner.reserved),
            "quarantined_tokens": 0 if gates is None else sum(req.kv.allocated_len for req in gates.quarantined),
            "free_tokens": memory.allocator.free_tokens,
            "cached_tokens_now": memory.cache.cached_tokens,
            "locked_tokens": memory.cache.locked_tokens,
            "held_tokens": memory.held_tokens,
            "total_tokens": memory.total_tokens,
            "max_queued_requests": self._bounds.requests,
            "max_queued_tokens": self._bounds.tokens,
            "new_token_ratio": self._planner.ratio.current,
            "gates": [] if gates is None else gates.waiting_on(),
            "gate_stats": {} if gates is None else gates.stats(),
            "plugin_failures": sum(count for by_name in failures.values() for count in by_name.values()),
            "plugin_failures_by": failures,
            "policy": self._policy_stats(),
            "runner": {} if self._components.runner_figures is None else dict(self._components.runner_figures()),
            "stages": stages,
            **flat(stages),
            **self._beyond(),
        }

    def _beyond(self) -> dict[str, object]:
        """Return what a cache tells that keeps prefixes beyond the device too; nothing of others."""
        memory = self._components.memory
        return {"tiers": memory.guarded.stats()} if memory.cache.origins else {}

    def log(self, report: StepReport, batch: ScheduleBatch) -> None:
        """Log a line for every prefill, and one now and then for decodes."""
        planner, counters = self._planner, self._counters
        prompts = _prompts(batch) if batch.decoding < len(batch.reqs) else []
        if prompts:
            report.computed(batch.prompt_tokens, batch.committed_at - batch.planned_at)
            if report.talks:
                told, self._cached_told = self._cached_told, counters.cached_tokens
                report.prefill(
                    requests=len(prompts),
                    new_tokens=sum(prompts),
                    cached_tokens=counters.cached_tokens - told,
                    running=len(planner.running),
                    queued=len(planner.waiting),
                    used_tokens=self._used_tokens,
                    totals=self._components.points.reports.log_totals(),
                    loaded=self._loaded_tokens,
                )
        elif report.decode_due(counters.generated_tokens):
            report.decode(
                running=len(planner.running),
                queued=len(planner.waiting),
                used_tokens=self._used_tokens,
                parts=self._components.points.reports.log_decodes(),
            )

    @property
    def _loaded_tokens(self) -> dict[str, int]:
        return {origin: self._counters.cached_from[origin] for origin in self._components.memory.cache.origins}

    @property
    def _running_requests(self) -> int:
        planner = self._planner
        return len(planner.running) + len(planner.parked) + (planner.chunked is not None)

    @property
    def _used_tokens(self) -> int:
        """Tokens in pages that no other request could have: held by requests, or locked in the cache."""
        memory = self._components.memory
        return memory.held_tokens + memory.cache.locked_tokens

    def _plugin_failures(self) -> dict[str, dict[str, int]]:
        """Return calls of plugins that raised, by contract and provider; of hooks, by the hook's name."""
        memory, culprits, gates = self._components.memory, self._components.culprits, self._components.gates
        by_gate = {} if gates is None else gates.failures_by
        return culprits.all_counts(
            ("prefix_cache", memory.guarded.name, memory.guarded.failures),
            ("schedule_policy", culprits.name(self._components.policy), self._planner.policy.failures),
            *(("admission_gate", name, failures) for name, failures in by_gate.items()),
            *(("hooks", one.name, one.failures) for one in self._hooks),
        )

    def _policy_stats(self) -> dict[str, float]:
        policy = self._components.policy
        try:
            return dict(policy.stats())
        except Exception:
            logger.exception("%s.stats raised", type(policy).__name__)
            return {}


def _prompts(batch: ScheduleBatch) -> list[int]:
    """Return how much is computed for each prompt. A request whose prompt has its KV, and which gains that of a few
    tokens that are known already, is none of them: it goes on decoding.
    """
    prompts = batch.reqs[: len(batch.reqs) - batch.decoding]
    rows = zip(prompts, batch.prefix_lens.tolist(), batch.extend_lens.tolist(), strict=False)
    return [new for req, before, new in rows if before < req.input_len]
