"""What is told of each adapter."""

from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry

from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.plugins.adapters.metrics import AdapterMetrics
from pegboard.plugins.adapters.store import AdapterStore
from tests.plugins.adapters.test_hooks import context, hooks
from tests.plugins.adapters.test_store import Far


def test_figures_of_each_adapter() -> None:
    far, store = Far(), AdapterStore({"a": "/a", "b": "/b"}, 100, 2)
    store.ask = far.ask
    far.end(1)
    store.refresh()
    used = store.use("a")
    store.use("b")
    used.holders["1"] = Req("1", np.array([1]), SamplingParams())
    totals = store.totals_of("a")
    totals.requests, totals.prompt_tokens, totals.generation_tokens = 3, 40, 50
    registry = CollectorRegistry()
    registry.register(AdapterMetrics(store))

    def told(name: str, adapter: str) -> float | None:
        return registry.get_sample_value(f"pegboard_adapter_{name}", {"adapter": adapter})

    names = ("requests_running", "requests", "on_host", "requests_finished_total", "prompt_tokens_total")
    assert [told(name, "a") for name in (*names, "generation_tokens_total")] == [1, 1, 1, 3, 40, 50]
    assert [told(name, "b") for name in (*names, "generation_tokens_total")] == [0, 1, 0, 0, 0, 0]
    store.unload("a")
    assert told("requests", "a") is None, "requests cannot have it any more"
    assert told("requests_finished_total", "a") == 3, "a total never falls"
    store.load("a", "/other")
    store.totals_of("a").requests += 1
    assert told("requests_finished_total", "a") == 4, "whichever adapter the name means"


def test_totals_of_names_that_are_not_used_any_more_are_not_kept_for_ever() -> None:
    store = AdapterStore({"first": "/a"}, 100, 2)
    for number in range(2000):
        store.totals_of("first" if number == 0 else str(number)).requests += 1
    assert len(store.totals) < 1100
    assert store.totals["first"].requests == 1, "requests may have it"


def test_they_are_registered_where_there_are_adapters() -> None:
    for made, there in ((hooks(), False), (hooks(directories=["/"]), True)):
        made.pipeline_stages(context())
        registry = CollectorRegistry()
        made.register_metrics(registry)
        assert any(metric.name == "pegboard_adapter_requests" for metric in registry.collect()) == there
