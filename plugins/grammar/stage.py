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
    import msgspec

    from pegboard.core.interfaces.admission_gate import AdmissionGateContext
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import StageContext, StepResult, StepView

KINDS = ("json_schema", "json_object", "regex", "ebnf", "structural_tag", "any_of")
"""The capabilities of the contract that are kinds of grammars."""


class GrammarStage(Stage):
    """Takes part in requests with a grammar. `make` brings the gate and the kinds of grammars that its backend has, or
    None where it has none. It is called once the weights are there: a backend's tables are as large as the vocabulary,
    of which config.json may lie. `max_source_bytes` is the longest source that the gate takes.
    """

    name = NAME

    def __init__(
        self,
        make: Callable[[AdmissionGateContext], tuple[GrammarGate, Sequence[str]] | None],
        max_source_bytes: int = SOURCE_BYTES,
    ) -> None:
        self._make = make
        self._gate: GrammarGate | None = None
        self._max_source_bytes = max_source_bytes

    def gate(self, ctx: AdmissionGateContext) -> GrammarGate | None:
        if (made := self._make(ctx)) is not None:
            self._gate, kinds = made
            self.offers = tuple(f"{NAME}.{kind}" for kind in kinds)
        return self._gate

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        return None if message.sampling.grammar is None else Interest(constrained=True)

    def arrived(self, step: StepView, result: StepResult) -> None:
        if self._gate is not None:
            self._gate.grammars.work.begin_step()

    def adopt(self, req: Req, row: msgspec.Raw | None) -> None:
        # A first token that comes with its KV is a step of its own, of which `arrived` does not tell.
        if self._gate is not None:
            self._gate.grammars.work.begin_step()

    def info(self) -> Mapping[str, object]:
        return {"max_source_bytes": self._max_source_bytes}

    def figures(self) -> Mapping[str, float]:
        return {"grammar_waits": 0 if self._gate is None else self._gate.grammars.waits}


def grammar_stages(ctx: StageContext) -> list[Stage]:
    """Return the stage."""
    return [GrammarStage(partial(_made, ctx), ctx.config.grammar.max_source_bytes)]


def _made(ctx: StageContext, gate_ctx: AdmissionGateContext) -> tuple[GrammarGate, Sequence[str]] | None:
    """Return a gate around the chosen backend, with a pool of helper processes, and the backend's kinds of grammars."""
    context = GrammarContext(ctx.directory, ctx.tokenizer, ctx.spec.vocab_size, ctx.spec.eos_token_ids)
    chosen = ctx.choose(GRAMMAR, context)
    kinds = [kind for kind in KINDS if kind in chosen.provides]
    if not kinds:
        return None
    backend, settings = ctx.provider(GRAMMAR, context), ctx.config.grammar
    grammars = Grammars(
        context.vocab_size,
        context.eos_token_ids,
        GrammarWork(WorkLimits(settings.step_seconds, settings.work_seconds, settings.work_seconds_earned)),
        settings.jump_ahead,
        rolls_back="rollback" in chosen.provides,
    )
    limits = PoolLimits(
        settings.workers, settings.compile_timeout, settings.queue_timeout, settings.max_queued, settings.first_slice
    )
    gate = GrammarGate(
        GrammarGate.make_options(),
        gate_ctx,
        pool=GrammarPool(Start.of(backend, settings.worker_memory_bytes), backend, limits, grammars.prepare),
        grammars=grammars,
        limits=CacheLimits(settings.cache_entries, settings.cache_bytes, settings.max_source_bytes),
    )
    return gate, kinds
