"""GrammarGate: requests wait here until their grammar is compiled; what became of grammars is remembered."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pegboard.core.interfaces.admission_gate import (
    OPEN,
    AdmissionGate,
    AdmissionGateContext,
    GateOptions,
    Verdict,
)
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.grammar.constraint import Grammars
from pegboard.plugins.grammar.failures import failure_of
from pegboard.plugins.grammar.pool import GrammarPool
from pegboard.toolkit.system.blame import in_words

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.sampling import Grammar
    from pegboard.plugins.grammar.api import CompiledGrammar

logger = logging.getLogger(__name__)

FAILURE_SECONDS = 300.0
"""How long it is remembered that a grammar took too long or ended its worker, which the machine may be to blame for."""


SOURCE_BYTES = 256 * 1024
"""Longest source of a grammar, unless the config says otherwise."""


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Most entries and bytes of compiled grammars that are kept, and the longest source that is taken."""

    entries: int = 256
    bytes: int = 256 * 2**20
    source_bytes: int = SOURCE_BYTES


@dataclass(slots=True)
class _Entry:
    """A compiled grammar, or why there is none; by the clock's time `until`."""

    compiled: CompiledGrammar | None
    failure: Verdict | None
    size: int
    until: float = float("inf")


class GrammarCache:
    """What became of grammars, the failures too: the least recently used go first, by number and by size."""

    def __init__(self, limits: CacheLimits, clock: Clock = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._entries: OrderedDict[Grammar, _Entry] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, grammar: Grammar) -> CompiledGrammar | Verdict | None:
        """Return what is known: the grammar, why it failed, or nothing."""
        entry = self._entries.get(grammar)
        if entry is None:
            return None
        if self._clock() >= entry.until:
            self._drop(grammar)
            return None
        self._entries.move_to_end(grammar)
        return entry.compiled or entry.failure

    def put(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        self._put(grammar, _Entry(compiled, None, max(0, int(compiled.size_bytes)) + _size(grammar)))

    def put_failure(self, grammar: Grammar, failure: Verdict, seconds: float | None) -> None:
        """Remember that it failed, for so long; None: until there is no room."""
        until = float("inf") if seconds is None else self._clock() + seconds
        self._put(grammar, _Entry(None, failure, _size(grammar) + len(failure.reason), until))

    def _put(self, grammar: Grammar, entry: _Entry) -> None:
        if grammar in self._entries:
            self._drop(grammar)
        self._entries[grammar] = entry
        self.size_bytes += entry.size
        while len(self._entries) > self._limits.entries or self.size_bytes > self._limits.bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, grammar: Grammar) -> None:
        self.size_bytes -= self._entries.pop(grammar).size


def _size(grammar: Grammar) -> int:
    return 200 + 4 * len(grammar.source)


@dataclass(slots=True)
class _Job:
    """A grammar that is being compiled, and the requests that wait for it."""

    future: Future[CompiledGrammar]
    waiting: set[str] = field(default_factory=set)


class GrammarGate(AdmissionGate[GateOptions]):
    """Holds requests with a grammar back until it is compiled; equal grammars are compiled once.

    A request comes through at once where its grammar is known. One that fails, fails with status 400, and so does the
    next with the same grammar.
    """

    def __init__(
        self,
        options: GateOptions,
        ctx: AdmissionGateContext,
        *,
        pool: GrammarPool,
        grammars: Grammars,
        limits: CacheLimits | None = None,
    ) -> None:
        super().__init__(options, ctx)
        self.pool = pool
        self.limits = limits or CacheLimits()
        self.cache = GrammarCache(self.limits, ctx.clock)
        self.grammars = grammars
        self._jobs: dict[Grammar, _Job] = {}

    @classmethod
    def make_options(cls) -> GateOptions:
        """Without a time-out of the gate's own: queue and compilation have theirs."""
        return GateOptions(timeout=None)

    def concerns(self, req: Req) -> bool:
        return req.sampling.grammar is not None

    def enter(self, req: Req) -> Verdict:
        grammar = req.sampling.grammar
        assert grammar is not None
        size = len(grammar.source.encode("utf-8", "replace"))
        if size > self.limits.source_bytes:
            text = f"{grammar.kind}: {size} bytes are more than the {self.limits.source_bytes} that a grammar may have"
            return Verdict.failed(text, code="grammar_too_large", param=grammar.kind)
        known = self._known(req, grammar)
        if known is not None:
            return known
        job = self._jobs.get(grammar)
        if job is None:
            if self.pool.full and not self.pool.make_room(req.principal):
                text = f"{grammar.kind}: {self.pool.open} grammars wait to be compiled, try again later"
                return Verdict.failed(text, status=503, code="grammar_queue_full", param=grammar.kind)
            job = self._jobs[grammar] = _Job(self.pool.submit(grammar, req.principal))
        job.waiting.add(req.rid)
        return Verdict.blocked("its grammar is being compiled")

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        done = [grammar for grammar, job in self._jobs.items() if job.future.done()]
        if not done:
            return {}
        outcome = {grammar: self._settle(grammar) for grammar in done}
        verdicts = {}
        for req in blocked:
            grammar = req.sampling.grammar
            if grammar is not None and grammar in outcome:
                found = outcome[grammar]
                verdicts[req.rid] = found if isinstance(found, Verdict) else self._open(req, found)
        return verdicts

    def cancel(self, req: Req) -> None:
        self.grammars.forget(req)
        grammar = req.sampling.grammar
        job = None if grammar is None else self._jobs.get(grammar)
        if job is None or grammar is None:
            return
        job.waiting.discard(req.rid)
        if not job.waiting and job.future.cancel():
            del self._jobs[grammar]

    def finished(self, req: Req) -> bool:
        self.grammars.forget(req)
        return False

    def close(self) -> None:
        """End the helper processes and the thread."""
        self.pool.close()
        self.grammars.work.close()

    def stats(self) -> dict[str, int]:
        """Return entries and bytes of the cache, grammars under way, workers that had to be killed or died."""
        return {
            "cached": len(self.cache),
            "cached_bytes": self.cache.size_bytes,
            "compiling": self.pool.open,
            "workers_lost": self.pool.killed,
        }

    def _known(self, req: Req, grammar: Grammar) -> Verdict | None:
        found = self.cache.get(grammar)
        return found if found is None or isinstance(found, Verdict) else self._open(req, found)

    def _open(self, req: Req, compiled: CompiledGrammar) -> Verdict:
        try:
            self.grammars.begin(req, compiled)
        except BaseException as error:
            reason = failure_of(req, error)
            return Verdict.failed(reason.message, status=reason.status, code=reason.code)
        return OPEN

    def _settle(self, grammar: Grammar) -> CompiledGrammar | Verdict:
        """Take the result of a job that is done, into the cache."""
        future = self._jobs.pop(grammar).future
        try:
            compiled = future.result(timeout=0)
        except InvalidRequest as error:
            param = error.param or grammar.kind
            failure = Verdict.failed(error.message, status=error.status, code=error.code, param=param)
            if error.status < 500:
                lasting = error.code not in ("grammar_timeout", "grammar_failed", "grammar_too_large")
                self.cache.put_failure(grammar, failure, None if lasting else FAILURE_SECONDS)
            return failure
        except Exception as error:
            logger.exception("a compiled grammar cannot be loaded")
            text = f"{grammar.kind}: the compiled grammar cannot be loaded: {in_words(error)}"
            return Verdict.failed(text, status=500, code="grammar_failed", param=grammar.kind)
        self.cache.put(grammar, compiled)
        return compiled
