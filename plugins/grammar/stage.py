"""In the scheduler: requests with a grammar wait until it is compiled, and then follow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pegboard.core.interfaces.stage import Interest, Stage
from pegboard.plugins.grammar import GRAMMAR
from pegboard.plugins.grammar.api import NAME, GrammarContext
from pegboard.plugins.grammar.constraint import Grammars
from pegboard.plugins.grammar.gate import SOURCE_BYTES, CacheLimits, GrammarGate
from pegboard.plugins.grammar.pool import GrammarPool, PoolLimits
from pegboard.plugins.grammar.work import GrammarWork, WorkLimits
from pegboard.plugins.grammar.worker import Start

if TYPE_CHECKING:
    from pegboard.core.interfaces.admission_gate import AdmissionGateContext
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import LaunchedStep, StageContext, StepResult
    from pegboard.plugins.grammar.api import GrammarBackend
    from pegboard.plugins.grammar.options import GrammarSection

KINDS = ("json_schema", "json_object", "regex", "ebnf", "structural_tag", "any_of")
"""The capabilities of the contract that are kinds of grammars."""


class GrammarStage(Stage):
    """Takes part in requests with a grammar. `kinds` are those that the backend has, and `max_source_bytes` is the
    longest source that the gate takes.
    """

    name = NAME

    def __init__(
        self,
        grammars: Grammars,
        make_gate: Callable[[AdmissionGateContext], GrammarGate],
        kinds: Sequence[str] = KINDS,
        max_source_bytes: int = SOURCE_BYTES,
    ) -> None:
        self.offers = tuple(f"{NAME}.{kind}" for kind in kinds)
        self._grammars = grammars
        self._make_gate = make_gate
        self._max_source_bytes = max_source_bytes

    def gate(self, ctx: AdmissionGateContext) -> GrammarGate:
        return self._make_gate(ctx)

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        return None if message.sampling.grammar is None else Interest(constrained=True)

    def begin_plan(self) -> None:
        self._grammars.work.begin_step()  # `arrived` is not called for first tokens that came with their KV

    def arrived(self, step: LaunchedStep, result: StepResult) -> None:
        self._grammars.work.begin_step()

    def info(self) -> Mapping[str, object]:
        return {"max_source_bytes": self._max_source_bytes}

    def figures(self) -> Mapping[str, float]:
        return {"grammar_waits": self._grammars.waits}


def grammar_stages(ctx: StageContext) -> list[Stage]:
    """Return the stage, if the chosen backend has any grammars."""
    context = GrammarContext(ctx.directory, ctx.tokenizer, ctx.spec.vocab_size, ctx.spec.eos_token_ids)
    backend = ctx.provider(GRAMMAR, context)
    (chosen,) = ctx.choices[GRAMMAR.name]
    kinds = [kind for kind in KINDS if kind in chosen.provides]
    if not kinds:
        return []
    settings: GrammarSection = ctx.config.grammar
    limits = WorkLimits(settings.step_seconds, settings.work_seconds, settings.work_seconds_earned)
    grammars = Grammars(
        context.vocab_size,
        context.eos_token_ids,
        GrammarWork(limits),
        settings.jump_ahead,
        rolls_back="rollback" in chosen.provides,
    )
    make_gate = partial(_gate, backend, grammars, settings)
    return [GrammarStage(grammars, make_gate, kinds, settings.max_source_bytes)]


def _gate(
    backend: GrammarBackend, grammars: Grammars, settings: GrammarSection, ctx: AdmissionGateContext
) -> GrammarGate:
    """Return a gate around a backend, with a pool of helper processes."""
    limits = PoolLimits(
        settings.workers, settings.compile_timeout, settings.queue_timeout, settings.max_queued, settings.first_slice
    )
    start = Start.of(backend, settings.worker_memory_bytes)
    return GrammarGate(
        GrammarGate.make_options(),
        ctx,
        pool=GrammarPool(start, backend, limits, grammars.prepare),
        grammars=grammars,
        limits=CacheLimits(settings.cache_entries, settings.cache_bytes, settings.max_source_bytes),
    )
