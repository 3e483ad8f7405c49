"""What the scheduler tells Prometheus: its own counters, and histograms that the step hooks fill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pegboard.plugins.metrics_prometheus.families import PREFIX, Families
from pegboard.plugins.metrics_prometheus.histogram import Histogram
from pegboard.plugins.metrics_prometheus.media import ENCODING_FIGURES, encoding

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import ScheduleBatch
    from pegboard.core.interfaces.req import Req

WINDOW_S = 1.0
"""Generation throughput is told of windows of at least this length."""

FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 160, 320)
INTER_TOKEN = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2,
    0.3, 0.5, 1, 2, 5,
)  # fmt: skip
END_TO_END = (0.05, 0.1, 0.2, 0.4, 0.8, 1, 2, 5, 10, 20, 40, 60, 100, 200, 400, 800, 1600)
QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
STEP = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
LENGTH = tuple(1 << power for power in range(21))
SHARE = tuple(tenth / 10 for tenth in range(11))
MODES = ("prefill", "mixed", "decode")

_COUNTERS = (
    ("requests_accepted", "accepted", "Requests that were taken."),
    ("requests_rejected", "rejected", "Requests that were refused by the scheduler: full queue, too long, bad."),
    ("requests_aborted", "aborted", "Requests that ended otherwise than by their own end, failed ones included."),
    ("retractions", "retractions", "Times a running request was put back into the queue, preemptions included."),
    ("preemptions", "preemptions", "Times a running request gave way to a more urgent one."),
    ("failed_batches", "failed_batches", "Forward passes that raised."),
    ("book_errors", "book_errors", "Times the idle check found memory unaccounted for; always a bug."),
    ("prefill_steps", "prefill_steps", "Steps that computed prompts."),
    ("decode_steps", "decode_steps", "Steps that only decoded."),
    ("computed_prompt_tokens", "prompt_tokens", "Tokens computed in prefills, again after a retraction."),
    ("cached_tokens", "cached_tokens", "Prompt tokens that were found in the prefix cache."),
    ("cached_host_tokens", "cached_host_tokens", "Those of them that came from the host."),
    ("cached_storage_tokens", "cached_storage_tokens", "Those of them that a storage had and the host did not."),
    ("generation_tokens", "generated_tokens", "Tokens generated."),
    ("forced_tokens", "forced_tokens", "Of these, tokens that a grammar forced, for which the model was not asked."),
    ("verify_steps", "verify_steps", "Steps in which drafted tokens were verified."),
    ("drafted_tokens", "drafted_tokens", "Tokens that a speculator proposed and the model verified."),
    ("accepted_tokens", "accepted_tokens", "Of the tokens generated, those that had been drafted."),
    ("grammar_waits", "grammar_waits", "Times a request sat out steps, because its grammar takes long to follow."),
)
"""Metric without prefix and `_total`, the scheduler's figure, help."""

_GAUGES = (
    ("num_requests_running", "running_requests", "Requests whose tokens are being computed."),
    ("num_requests_waiting", "waiting_requests", "Requests in the queue."),
    ("num_requests_blocked", "blocked_requests", "Requests that an admission gate holds back."),
    ("num_requests_held", "held_requests", "Requests that have finished and whose KV is still in use."),
    ("num_requests_seated", "seated_requests", "Of the blocked ones, those whose KV a gate brings into their memory."),
    ("num_quarantined_tokens", "quarantined_tokens", "Tokens of the KV pool out of use, since they may be written to."),
    ("max_total_num_tokens", "total_tokens", "Tokens that the KV pool holds."),
    ("num_free_tokens", "free_tokens", "Tokens of the KV pool that are free."),
    ("new_token_ratio", "new_token_ratio", "Share of the remaining output that admission reserves memory for."),
)

_STAGES = (
    ("schedule", "schedule_time"),
    ("draft", "draft_time"),
    ("forward", "forward_time"),
    ("results", "results_time"),
)


def _without_own(stages: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the figures of stages that have no metric of their own."""
    own = {key for _, key, _ in (*_COUNTERS, *_GAUGES)} | {key for _, key in _STAGES} | ENCODING_FIGURES
    return {stage: {name: told[name] for name in told if name not in own} for stage, told in stages.items()}


class SchedulerCollector(Collector):
    """Takes batches and ended requests from hooks, and makes metrics of them when it is asked.

    `stats` gives the scheduler's own figures; `clock` is the one that requests and batches are stamped by.
    """

    def __init__(
        self, model_name: str, stats: Callable[[], Mapping[str, Any]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._families = Families(model_name)
        self._stats = stats
        self._clock = clock
        self._first_token = Histogram(FIRST_TOKEN)
        self._inter_token = Histogram(INTER_TOKEN)
        self._end_to_end = Histogram(END_TO_END)
        self._queue = Histogram(QUEUE)
        self._prompt_len = Histogram(LENGTH)
        self._output_len = Histogram(LENGTH)
        self._cached_share = Histogram(SHARE)
        self._steps = {mode: Histogram(STEP) for mode in MODES}
        self._finished = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self._window = 0.0
        self._tokens = 0
        self._throughput = 0.0

    # ---- hooks ----------------------------------------------------------------------------------------------------

    def batch_committed(self, batch: ScheduleBatch) -> None:
        """Per step; for a decode of any size a dozen numpy calls at most."""
        if not batch.reqs:
            return
        now = batch.committed_at
        decode = batch.decoding == len(batch.reqs)
        mode = "decode" if decode else "mixed" if batch.decoding else "prefill"
        if decode or batch.num_tokens:  # a batch of what was computed elsewhere is not a step
            self._steps[mode].observe(now - batch.planned_at)
        intervals = batch.token_intervals
        if intervals is not None:
            self._inter_token.observe_many(intervals)
            self._tokens += intervals.shape[0]
        if now - self._window >= WINDOW_S:
            self._throughput = self._tokens / (now - self._window)
            self._window, self._tokens = now, 0
        if not decode:
            self._note_first_tokens(batch)

    def _note_first_tokens(self, batch: ScheduleBatch) -> None:
        for req in batch.reqs[: len(batch.reqs) - batch.decoding]:
            # Of a retracted request, which is prefilled again, this is not the first.
            if req.output_len == 1 and req.rid not in batch.partial:
                times = req.timing
                self._first_token.observe(times.first_token - times.arrived)
                self._queue.observe(max(0.0, times.first_scheduled - (times.ready or times.arrived)))

    def requests_finished(self, reqs: Sequence[Req]) -> None:
        for req in reqs:
            reason = req.output.finish_reason
            kind = "abort" if reason is None else reason.type.value
            if kind == "abort":
                if reason is not None and reason.status >= 500:
                    kind = "error"
                self._finished[kind] += 1
                continue
            self._finished[kind] = self._finished.get(kind, 0) + 1
            self._end_to_end.observe(req.timing.finished - req.timing.arrived)
            self._prompt_len.observe(req.input_len)
            self._output_len.observe(req.output_len)
            self._cached_share.observe(min(1.0, req.output.cached_tokens / max(1, req.input_len)))

    # ---- asked by the registry ------------------------------------------------------------------------------------

    def describe(self) -> list[Metric]:
        """Nothing in advance, so that registering it asks the scheduler nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats, families = self._stats(), self._families
        for name, key, text in _COUNTERS:
            yield families.counter(name, text, stats.get(key, 0))
        prompt = stats.get("prompt_tokens", 0) + stats.get("cached_tokens", 0)
        yield families.counter("prompt_tokens", "Tokens of scheduled prompts, computed or found in the cache.", prompt)
        yield families.counter("requests_finished", "Requests that ended, by reason.", self._finished, "reason")
        yield self._failures(stats.get("plugin_failures_by", {}))
        stages = {stage: stats.get(key, 0.0) for stage, key in _STAGES}
        yield families.counter("stage_seconds", "Time of the scheduler's loop, by stage.", stages, "stage")
        for name, key, text in _GAUGES:
            yield families.gauge(name, text, stats.get(key, 0))
        yield from self._shares(stats)
        yield from encoding(families, stats)
        yield from self._tiers(stats.get("tiers", {}))
        yield from self._told("gates", "admission gates", stats.get("gate_stats", {}))
        yield from self._told("stages", "stages", _without_own(stats.get("stages", {})))
        policy = stats.get("policy", {})
        yield families.gauge("policy", "What the schedule policy says of itself.", policy, "figure")
        yield from self._histograms()

    def _told(self, metric: str, which: str, figures: Mapping[str, Mapping[str, float]]) -> Iterator[Metric]:
        """Yield what plugins of a kind tell of themselves, by their names; nothing where none does."""
        told = {f"{plugin}_{name}": value for plugin, own in figures.items() for name, value in own.items()}
        if not told:
            return
        totals = {name.removesuffix("_total"): value for name, value in told.items() if name.endswith("_total")}
        now = {name: value for name, value in told.items() if not name.endswith("_total")}
        yield self._families.counter(metric, f"What {which} have done, by name and figure.", totals, "figure")
        yield self._families.gauge(f"{metric}_now", f"What {which} have now, by name and figure.", now, "figure")

    def _tiers(self, tiers: Mapping[str, float]) -> Iterator[Metric]:
        """Yield what moves between device, host and storages; nothing where the prefix cache has no tiers."""
        if not tiers:
            return
        totals = {name.removesuffix("_total"): value for name, value in tiers.items() if name.endswith("_total")}
        now = {name: value for name, value in tiers.items() if not name.endswith("_total")}
        yield self._families.counter("kv_tiers", "What was moved between tiers of KV, by figure.", totals, "figure")
        yield self._families.gauge("kv_tiers_now", "What tiers of KV hold just now, by figure.", now, "figure")

    def _shares(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        families, total = self._families, max(1, stats.get("total_tokens", 0))
        used = (stats.get("held_tokens", 0) + stats.get("locked_tokens", 0)) / total
        yield families.gauge(
            "token_usage", "Share of the KV pool that running requests use, cached parts included.", used
        )
        cached = stats.get("cached_tokens_now", 0) / total
        yield families.gauge("cache_usage", "Share of the KV pool that the prefix cache keeps, in use or not.", cached)
        drafted = stats.get("drafted_requests", 0)
        accepted = stats.get("accepted_tokens", 0)
        yield families.gauge(
            "spec_accept_length",
            "Tokens that a request gained per step in which it had drafts, its own one included.",
            (drafted + accepted) / max(1, drafted),
        )
        rate = accepted / max(1, stats.get("drafted_tokens", 0))
        yield families.gauge("spec_accept_rate", "Share of the drafted tokens that were accepted.", rate)
        yield families.gauge(
            "gen_throughput", "Tokens generated per second, over the last second or so.", self.throughput()
        )

    def throughput(self) -> float:
        """Return tokens per second of the last window that is complete; 0 where nothing has come for longer than
        that.
        """
        return self._throughput if self._clock() - self._window < 2 * WINDOW_S else 0.0

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", self._first_token),
            ("inter_token_latency_seconds", "From one token of a request to its next.", self._inter_token),
            ("e2e_request_latency_seconds", "From a request's arrival to its last token.", self._end_to_end),
            ("queue_time_seconds", "From a request's entry into the queue to its first step.", self._queue),
            ("prompt_tokens_histogram", "Prompt lengths of requests that ended well.", self._prompt_len),
            ("generation_tokens_histogram", "Output lengths of requests that ended well.", self._output_len),
            ("cached_share", "Share of a request's prompt that was found in the cache.", self._cached_share),
        ):
            yield self._families.histogram(name, text, histogram)
        yield self._families.histogram(
            "step_seconds", "From planning a batch to taking its results.", self._steps, "mode"
        )

    # ---- families -------------------------------------------------------------------------------------------------

    def _failures(self, values: Mapping[str, Mapping[str, int]]) -> Metric:
        text = "Calls into plugins that raised, by contract and provider."
        family = CounterMetricFamily(f"{PREFIX}plugin_failures", text, labels=["model_name", "contract", "provider"])
        for contract, by_name in values.items():
            for name, count in by_name.items():
                family.add_metric([self._families.model_name, contract, name], count)
        return family
