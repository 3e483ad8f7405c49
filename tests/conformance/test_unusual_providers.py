"""Providers that are unlike most, and right: the suites can be told so, and then test them."""

from __future__ import annotations

import contextlib
import io
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pegboard.conformance.admission_gate import AdmissionGateContract, gated_request
from pegboard.conformance.collecting import InMemory
from pegboard.conformance.fakes import registry_of
from pegboard.conformance.logits_processor import LogitsProcessorContract
from pegboard.conformance.mutants import Mutant, assert_caught
from pegboard.conformance.outcomes import Outcomes
from pegboard.conformance.prefix_cache import PrefixCacheContract
from pegboard.conformance.schedule_policy import SchedulePolicyContract
from pegboard.core.interfaces.admission_gate import OPEN, AdmissionGate, AdmissionGateContext, Verdict
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.logits_processor import LogitsProcessor
from pegboard.core.interfaces.plugin import Provider
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams, SamplingRow
from pegboard.plugins.cache_radix.cache import RadixCache
from pegboard.plugins.grammar.suite import GrammarContract
from pegboard.plugins.grammar_llguidance.backend import LLGuidanceBackend
from pegboard.plugins.policy_basic.policies import FcfsPolicy

_QUIET = ("-p", "no:faulthandler", "-p", "no:threadexception", "-p", "no:unraisableexception", "-p", "no:timeout")
"""Plugins that watch the whole process: the outer run has its own."""


def ran(contract: str, cls: type[Any], *args: str) -> Outcomes:
    """What became of a class's tests."""
    outcomes = Outcomes()
    with contextlib.redirect_stdout(io.StringIO()):
        InMemory(contract, lambda: {cls.__name__: cls}).run("--capture=no", *args, *_QUIET, plugins=[outcomes])
    return outcomes


class RateLimit(AdmissionGate):
    """One request in half a second, whatever it says."""

    def __init__(self, options: Any, ctx: AdmissionGateContext) -> None:
        super().__init__(options, ctx)
        self._free = 0.0
        self._turn: dict[str, float] = {}

    def concerns(self, req: Req) -> bool:
        return True

    def enter(self, req: Req) -> Verdict:
        turn = max(self._free, self.ctx.clock())
        self._free = turn + 0.5
        self._turn[req.rid] = turn
        return self.poll([req])[req.rid]

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        now = self.ctx.clock()
        return {one.rid: OPEN if now >= self._turn[one.rid] else Verdict.blocked("its turn") for one in blocked}

    def cancel(self, req: Req) -> None:
        self._turn.pop(req.rid, None)

    def finished(self, req: Req) -> bool:
        self.cancel(req)
        return False


class TestRateLimit(AdmissionGateContract):
    factory = RateLimit
    params = ()

    def unconcerned_request(self) -> Req | None:
        return None

    def blocked_request(self, gate: AdmissionGate) -> Req:
        gate.enter(gated_request())
        return gated_request()


class ConcernsSome(RateLimit):
    def concerns(self, req: Req) -> bool:
        return bool(req.params)


def test_what_is_said_of_every_request_is_tested() -> None:
    caught_by = "test_a_request_that_asks_for_nothing_does_not_concern_it"
    assert_caught(Mutant(ConcernsSome, TestRateLimit, caught_by))


class Threaded(RateLimit):
    """Its own thread finds out, in real time, whatever the clock says."""

    def enter(self, req: Req) -> Verdict:
        if not req.params:
            return OPEN
        done = self._done[req.rid] = threading.Event()
        timer = threading.Timer(0.05, done.set)
        timer.daemon = True
        timer.start()
        return Verdict.blocked("the thread works")

    def __init__(self, options: Any, ctx: AdmissionGateContext) -> None:
        super().__init__(options, ctx)
        self._done: dict[str, threading.Event] = {}

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        return {one.rid: OPEN for one in blocked if self._done[one.rid].is_set()}

    def cancel(self, req: Req) -> None:
        self._done.pop(req.rid, None)


class ExampleOfThreaded(AdmissionGateContract):
    factory = Threaded
    params = ("threaded",)

    def unconcerned_request(self) -> Req | None:
        return None

    def blocked_request(self, gate: AdmissionGate) -> Req:
        return gated_request({"threaded": {"x": 1}})


def test_a_gate_whose_thread_takes_a_while_is_waited_for() -> None:
    outcomes = ran("admission_gate", ExampleOfThreaded, "-k", "blocked_until or waiting_never or others_alone")
    assert not outcomes.failed + outcomes.errors
    assert len(outcomes.passed) == 3


class KeepsTheLastWaits(FcfsPolicy):
    """Thousands of them, and never more."""

    def __init__(self, options: Any, ctx: Any) -> None:
        super().__init__(options, ctx)
        self.waits: deque[tuple[str, float]] = deque(maxlen=4096)

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        self.waits += [(req.rid, req.timing.waiting_since) for req in waiting]
        return list(waiting)


class ExampleOfAHistory(SchedulePolicyContract):
    factory = KeepsTheLastWaits


class RemembersTheEvicted(RadixCache):
    """The last ones of them."""

    def __init__(self, options: Any, ctx: Any) -> None:
        super().__init__(options, ctx)
        self.gone: deque[tuple[int, int]] = deque(maxlen=1000)

    def evict(self, num_tokens: int) -> int:
        self.gone += [(100_000 + len(self.gone), 200_000 + num_tokens + one) for one in range(3)]
        return super().evict(num_tokens)


class ExampleOfEvicted(PrefixCacheContract):
    factory = RemembersTheEvicted


def test_a_history_with_an_end_is_no_leak() -> None:
    for contract, cls, test in (
        ("schedule_policy", ExampleOfAHistory, "are_let_go"),
        ("prefix_cache", ExampleOfEvicted, "leaves_nothing_behind"),
    ):
        outcomes = ran(contract, cls, "-k", test)
        assert outcomes.passed
        assert not outcomes.failed + outcomes.errors


class OnlySomeGrammars(GrammarContract):
    """Takes alternatives of expressions, and knows no schemas."""

    factory = LLGuidanceBackend
    provides = frozenset({"any_of", "regex", "ebnf"})


def test_a_union_of_grammars_that_a_backend_lacks_is_not_passed() -> None:
    outcomes = ran("grammar", OnlySomeGrammars, "-k", "any_of or said_of_that_part")
    assert not outcomes.passed + outcomes.failed + outcomes.errors
    assert len(outcomes.skipped) == 4


class Sharpen(LogitsProcessor):
    """Has a parameter that every request must give."""

    def wants(self, params: SamplingParams) -> bool:
        own = params.extra.get("sharpen")
        if own is not None and (set(own) != {"by"} or type(own["by"]) is not float or not 0 < own["by"] < 100):
            raise InvalidRequest("by must be a number, and nothing else is known", param="custom_params.sharpen.by")
        return own is not None

    def prepare(self, rows: Sequence[SamplingRow]) -> Any:
        by = [row.params.extra.get("sharpen", {}).get("by", 1.0) for row in rows]
        return torch.tensor(by)[:, None] if any(self.wants(row.params) for row in rows) else None

    def apply(self, logits: torch.Tensor, state: Any) -> None:
        logits *= state


SHARPEN = Provider(
    "logits_processor", "sharpen", f"{__name__}:Sharpen", "sharper logits", provides=frozenset({"params"})
)


class BareSharpen(LogitsProcessorContract):
    provider = "sharpen"
    registry = registry_of(SHARPEN)


class ExampleOfSharpen(BareSharpen):
    def asking(self) -> Sequence[SamplingParams]:
        return [SamplingParams(extra={"sharpen": {"by": by}}) for by in (0.5, 2.0)]


def test_a_parameter_that_must_be_given() -> None:
    """Without an example nothing fails that could not work; with one everything is tested."""
    for cls, passes in ((BareSharpen, False), (ExampleOfSharpen, True)):
        outcomes, output = Outcomes(), io.StringIO()
        with contextlib.redirect_stdout(output):
            InMemory("logits_processor", lambda cls=cls: {cls.__name__: cls}).run(  # type: ignore[misc]
                "-rs", "--capture=no", "-k", "not a_row_depends", *_QUIET, plugins=[outcomes]
            )
        assert not outcomes.failed + outcomes.errors, output.getvalue()
        assert any("test_a_long_decode" in name for name in outcomes.passed) is passes
        assert ("override asking" in output.getvalue()) is not passes
        assert ("it refuses {'sharpen': {}}: by must be a number" in output.getvalue()) is not passes
