"""What the collector makes of real batches: a real scheduler around a fake model, in a time of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pegboard.conformance.admission_gate import ManualClock
from pegboard.core.interfaces.admission_gate import AdmissionGateContext
from pegboard.core.interfaces.batch import ScheduleBatch
from pegboard.core.interfaces.forward import ForwardMode
from pegboard.core.interfaces.hooks import hookimpl
from pegboard.core.interfaces.messages import AbortRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.stage import Stage
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.components import StepHooks
from pegboard.core.pipeline.gates import GateKeeper
from pegboard.core.registry.hooks import Hooks
from pegboard.plugins.kv_handoff.stage import NAME, KVHandoff
from pegboard.plugins.metrics_prometheus.collector import SchedulerCollector
from pegboard.plugins.metrics_prometheus.hooks import RENDER, MetricsHooks
from pegboard_drills.gate import DrillGate
from pegboard_drills.options import DrillGateOptions
from tests.core.pipeline.harness import VOCAB, Harness, Seer

EVERY = {"sampling": {"ignore_eos": True}}


class Clock:
    """Half a second passes at every look."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


class Watched:
    """A harness, its collector, and what that says."""

    def __init__(self, **options: Any) -> None:
        hooks = MetricsHooks()
        hooks.configure(SimpleNamespace(apis=[SimpleNamespace(use="metrics")]))
        clock = Clock()
        parts = {"clock": clock, **options.pop("parts", {})}
        frozen = StepHooks(batch_committed=(hooks.batch_committed,), requests_finished=(hooks.requests_finished,))
        self.harness = Harness(hooks=frozen, parts=parts, **options)
        self.collector = SchedulerCollector("some model", self.harness.scheduler.info, clock)
        hooks._collector = self.collector
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self.collector)

    def value(self, name: str, **labels: str) -> float:
        """One series of what is exposed, as a Prometheus server reads it."""
        found = samples(generate_latest(self.registry).decode(), name, **labels)
        assert len(found) == 1, (name, found)
        return found[0]


def samples(text: str, name: str, **labels: str) -> list[float]:
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"pegboard_{name}" and labels.items() <= sample.labels.items()
    ]


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_tokens_and_requests_add_up(loop: str) -> None:
    watched = Watched(loop=loop)
    for number in range(5):
        watched.harness.submit(f"r{number}", [number] * 20, 10 + number, **EVERY)  # type: ignore[arg-type]
    watched.harness.run()
    value = watched.value
    assert value("generation_tokens_total") == 10 + 11 + 12 + 13 + 14
    assert value("prompt_tokens_total") == 100
    assert value("requests_finished_total", reason="length") == 5
    assert value("time_to_first_token_seconds_count") == 5
    assert value("queue_time_seconds_count") == 5
    assert value("inter_token_latency_seconds_count") == 60 - 5
    assert value("e2e_request_latency_seconds_count") == 5
    assert value("prompt_tokens_histogram_sum") == 100
    assert value("prompt_tokens_histogram_bucket", le="16.0") == 0
    assert value("prompt_tokens_histogram_bucket", le="32.0") == 5
    assert value("generation_tokens_histogram_sum") == 60
    assert value("num_requests_running") == value("num_requests_waiting") == 0
    modes = {mode: value("step_seconds_count", mode=mode) for mode in ("prefill", "decode", "mixed")}
    assert modes["prefill"] == value("prefill_steps_total")
    assert modes["decode"] == value("decode_steps_total")
    assert modes["mixed"] == 0


def test_times_are_the_clocks() -> None:
    watched = Watched()
    watched.harness.submit("r", list(range(8)), 6, **EVERY)  # type: ignore[arg-type]
    [req] = watched.harness.scheduler.waiting
    watched.harness.run()
    times = req.timing
    value = watched.value
    assert value("time_to_first_token_seconds_sum") == pytest.approx(times.first_token - times.arrived)
    assert value("queue_time_seconds_sum") == pytest.approx(times.first_scheduled - times.ready)
    assert value("e2e_request_latency_seconds_sum") == pytest.approx(times.finished - times.arrived)
    decode = times.finished - times.first_token
    assert value("inter_token_latency_seconds_sum") == pytest.approx(decode)
    assert decode > 0


def test_what_a_gate_brings() -> None:
    """Its first token is one, and no step; and the gate says what it does."""
    clock = ManualClock()
    handoff = KVHandoff(VOCAB)
    gate = DrillGate(DrillGateOptions(), AdmissionGateContext(clock, stages={NAME: handoff}))
    keeper = GateKeeper([("drill", gate)], clock)
    watched = Watched(parts={"gates": keeper}, joining=[handoff])
    params = {"drill": {"act": "bring", "token": 9, "delay": 1.0}}
    gate.write = lambda rid, memory, wanted: watched.harness.model.slots.__setitem__(memory.slots, 1)
    watched.harness.submit("brought", [1] * 20, 6, params=params, sampling=EVERY["sampling"])
    watched.harness.step()
    assert watched.value("num_requests_seated") == watched.value("gates_now", figure="drill_reservations") == 1
    clock.advance(2.0)
    watched.harness.run()
    value = watched.value
    assert value("gates_total", figure="drill_brought") == 1
    assert value("time_to_first_token_seconds_count") == 1
    assert value("inter_token_latency_seconds_count") == value("generation_tokens_total") == 5
    assert value("step_seconds_count", mode="prefill") + value("step_seconds_count", mode="decode") == 5


class Counting(Stage):
    name = "counting"

    def figures(self) -> dict[str, float]:
        return {"seen_total": 3, "free": 2, "drafted_tokens": 7}


def test_what_a_stage_tells() -> None:
    """What has a metric of its own is not there again."""
    watched = Watched(joining=[Counting()])
    assert watched.value("stages_total", figure="counting_seen") == 3
    assert watched.value("stages_now", figure="counting_free") == 2
    text = generate_latest(watched.registry).decode()
    assert not samples(text, "stages_now", figure="counting_drafted_tokens")
    assert watched.value("drafted_tokens_total") == 7


def test_cached_tokens_and_share() -> None:
    watched = Watched(page_size=1)
    prompt = list(range(40))
    watched.harness.submit("first", prompt, 2, **EVERY)  # type: ignore[arg-type]
    watched.harness.run()
    watched.harness.submit("second", [*prompt[:30], *range(100, 110)], 2, **EVERY)  # type: ignore[arg-type]
    watched.harness.run()
    assert watched.value("cached_tokens_total") == 30
    assert watched.value("prompt_tokens_total") == 80
    assert watched.value("computed_prompt_tokens_total") == 50
    assert watched.value("cached_share_sum") == pytest.approx(0.75)
    assert watched.value("cached_share_bucket", le="0.7") == 1
    assert watched.value("cached_share_bucket", le="0.8") == 2
    assert watched.value("cache_usage") > 0
    assert watched.value("token_usage") == 0


def test_a_retracted_request_has_one_first_token() -> None:
    # Admission reckons with next to no growth, so that running requests have to be retracted.
    watched = Watched(tokens=96, estimate_max_new_tokens=1, retract_lookahead=0)
    for number in range(8):
        watched.harness.submit(f"r{number}", [number, 2 * number, 5] * 4, 40)
    watched.harness.run()
    assert watched.value("retractions_total") > 0, "nothing was retracted, so this shows nothing"
    assert watched.value("time_to_first_token_seconds_count") == 8
    sent = sum(len(watched.harness.tokens(f"r{number}")) for number in range(8))
    assert watched.value("generation_tokens_total") == sent
    assert watched.value("generation_tokens_histogram_sum") == sent


def test_chunks_give_one_first_token() -> None:
    watched = Watched(chunk=8)
    watched.harness.submit("r", list(range(50)), 3, **EVERY)  # type: ignore[arg-type]
    watched.harness.run()
    assert watched.value("step_seconds_count", mode="prefill") == 7
    assert watched.value("time_to_first_token_seconds_count") == 1


def test_mixed_batches_have_a_mode_of_their_own() -> None:
    watched = Watched(chunk=8, mixed_chunk=True)
    watched.harness.submit("a", [1, 2, 3], 30, **EVERY)  # type: ignore[arg-type]
    watched.harness.step()
    watched.harness.submit("b", list(range(30)), 3, **EVERY)  # type: ignore[arg-type]
    watched.harness.run()
    assert watched.value("step_seconds_count", mode="mixed") > 0
    assert watched.value("time_to_first_token_seconds_count") == 2


@pytest.mark.parametrize("run", [1, 16])
def test_while_requests_run(run: int) -> None:
    watched = Watched(max_running_requests=2, run=run)
    for number in range(3):
        watched.harness.submit(f"r{number}", [number] * 10, 50, **EVERY)  # type: ignore[arg-type]
    for _ in range(5):
        watched.harness.step()
    assert watched.value("gen_throughput") > 0
    assert watched.value("num_requests_running") == 2
    assert watched.value("num_requests_waiting") == 1
    # Their prompts are in the cache, locked, and their outputs are their own.
    used = sum(req.kv.committed_len for req in watched.harness.scheduler.running)
    assert used >= 2 * (10 + 3)
    taken = sum(req.kv.allocated_len for req in watched.harness.scheduler.running)
    assert used <= taken <= used + 2 * run
    assert watched.value("token_usage") == taken / 4096
    watched.harness.scheduler.receive([AbortRequest(all_requests=True)])
    watched.harness.run()
    assert watched.value("requests_finished_total", reason="abort") == 3
    assert watched.value("requests_aborted_total") == 3
    assert watched.value("e2e_request_latency_seconds_count") == 0


def test_throughput_ends_with_the_tokens() -> None:
    watched = Watched()
    watched.harness.submit("r", [1, 2, 3], 20, **EVERY)  # type: ignore[arg-type]
    watched.harness.run()
    assert watched.collector.throughput() > 0
    for _ in range(6):
        watched.collector._clock()
    assert watched.collector.throughput() == 0


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        (FinishReason(FinishType.STOP), "stop"),
        (FinishReason(FinishType.LENGTH), "length"),
        (FinishReason(FinishType.ABORT, status=499), "abort"),
        (FinishReason(FinishType.ABORT, status=500), "error"),
        (FinishReason(FinishType.ABORT, status=504), "error"),
    ],
)
def test_reasons(reason: FinishReason, label: str) -> None:
    watched = Watched()
    req = Req("r", np.arange(3), SamplingParams(max_new_tokens=3))
    req.output.finish_reason = reason
    watched.collector.requests_finished([req])
    counted = {
        one: watched.value("requests_finished_total", reason=one) for one in ("stop", "length", "abort", "error")
    }
    assert counted == {**dict.fromkeys(counted, 0), label: 1}


def test_a_decode_step_runs_no_python_per_request() -> None:
    """The requests of a decode batch are not looked at: that is what the arrays are for."""

    class Untouchable(list[Req]):
        def __iter__(self) -> Any:
            raise AssertionError("somebody goes through the requests of a decode batch")

        __getitem__ = __iter__  # type: ignore[assignment]

    watched = Watched()
    reqs = Untouchable([Req(f"r{i}", np.arange(3), SamplingParams()) for i in range(4)])
    intervals = np.array([0.01, 0.02, np.nan, 0.02])
    ones = np.ones(4, np.int64)
    batch = ScheduleBatch(1, ForwardMode.DECODE, reqs, 3 * ones, ones, 2 * ones, decoding=4)
    batch.intervals, batch.planned_at, batch.committed_at = intervals, 1.0, 1.02
    watched.collector.batch_committed(batch)
    assert watched.value("inter_token_latency_seconds_count") == 3
    assert watched.value("inter_token_latency_seconds_sum") == pytest.approx(0.05)


def test_tokens_that_were_drafted() -> None:
    """Tokens that came together share the time before them."""
    watched = Watched(speculator=Seer(1.0, nodes=4))
    watched.harness.submit("r", [3, 4, 5], 20, sampling={"ignore_eos": True})
    watched.harness.run()
    counters = watched.harness.drafts
    assert watched.value("drafted_tokens_total") == watched.value("accepted_tokens_total") == counters.accepted_tokens
    assert watched.value("verify_steps_total") == counters.verify_steps > 0
    assert watched.value("inter_token_latency_seconds_count") == 19
    assert watched.value("spec_accept_rate") == 1
    assert watched.value("spec_accept_length") == pytest.approx(1 + counters.accepted_tokens / counters.verify_steps)


def test_the_policy_speaks_for_itself() -> None:
    collector = SchedulerCollector("m", lambda: {"policy": {"fallback_steps": 7.0}})
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    assert samples(generate_latest(registry).decode(), "policy", figure="fallback_steps") == [7.0]


def test_failures_of_plugins_have_their_names() -> None:
    failures = {"sampler": {"mine": 3}, "logits_processor": {"mine": 1, "yours": 2}}
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SchedulerCollector("m", lambda: {"plugin_failures_by": failures}))
    text = generate_latest(registry).decode()
    assert samples(text, "plugin_failures_total", contract="sampler", provider="mine") == [3.0]
    assert samples(text, "plugin_failures_total", contract="logits_processor", provider="yours") == [2.0]


# ---- hooks ----------------------------------------------------------------------------------------------------------


class Engine:
    """An EngineView that keeps what it is given."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.controls: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}

    def stats(self) -> dict[str, Any]:
        return {"generated_tokens": 5}

    def add_control(self, action: str, run: Any) -> None:
        self.controls[action] = run

    def call_hook(self, name: str, **arguments: Any) -> list[Any]:
        found: list[Any] = getattr(self.hooks.call, name)(**arguments)
        return found


def started(*apis: str, others: tuple[object, ...] = ()) -> Engine:
    hooks = Hooks()
    for one in (MetricsHooks(), *others):
        hooks.add(one)
    hooks.call.configure(config=SimpleNamespace(apis=[SimpleNamespace(use=name) for name in apis]), origins={})
    engine = Engine(hooks)
    hooks.call.engine_started(info=SimpleNamespace(served_name="a model"), engine=engine)
    return engine


def test_the_action_answers_text() -> None:
    text = started("openai", "metrics").controls[RENDER]({})["text"]
    assert samples(text, "generation_tokens_total", model_name="a model") == [5]
    assert samples(text, "scheduler_process_resident_memory_bytes")[0] > 0


def test_nothing_happens_without_the_api() -> None:
    engine = started("openai", "native")
    assert engine.controls == {}
    for hook in (*engine.hooks.freeze("batch_committed"), *engine.hooks.freeze("requests_finished")):
        hook([])


def test_other_plugins_add_theirs() -> None:
    class Other:
        @hookimpl
        def register_metrics(self, registry: CollectorRegistry) -> None:
            from prometheus_client import Counter

            Counter("other_things", "Of another plugin.", registry=registry).inc(3)

    text = started("metrics", others=(Other(),)).controls[RENDER]({})["text"]
    assert "other_things_total 3.0" in text
