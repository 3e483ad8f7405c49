"""Spans of a request that has ended, by its times."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pegboard.conformance.stage import StageContract
from pegboard.core.config.compose import compose
from pegboard.core.interfaces.errors import ConfigError
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.stage import Stage
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.plugins.tracing_otel.hooks import TracingHooks
from pegboard.plugins.tracing_otel.options import TracingFields
from pegboard.plugins.tracing_otel.outbox import Outbox
from pegboard.plugins.tracing_otel.stage import TraceStage
from pegboard.plugins.tracing_otel.tracing import Figures

PARENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
NOW = 100.0


class TestTraceStage(StageContract):
    def make_stage(self) -> Stage:
        return TraceStage(Outbox(InMemorySpanExporter(), "there"))

    def feature(self) -> object:
        return PARENT


def request(times: Mapping[str, float], reason: FinishReason | None = None) -> Req:
    req = Req("r", np.arange(5), SamplingParams(max_new_tokens=4), arrived=10.0, model="m", name="mine")
    for name, value in times.items():
        setattr(req.timing, name, value)
    req.output.finish_reason = reason or FinishReason(FinishType.STOP)
    return req


def phases(req: Req) -> dict[str, float]:
    """Return the seconds of each phase."""
    return {name: (end - begin) / 1e9 for name, begin, end in Figures.of(req, lambda: NOW).phases}


WHOLE = {"ready": 12.0, "first_scheduled": 15.0, "first_token": 16.0, "finished": 20.0}


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (WHOLE, {"gate": 2, "queue": 3, "prefill": 1, "decode": 4}),
        (WHOLE | {"ready": 10.0001}, {"queue": 5, "prefill": 1, "decode": 4}),
        ({"ready": 10.0, "first_scheduled": 15.0, "finished": 20.0}, {"queue": 5, "prefill": 5}),
        ({"ready": 10.0, "finished": 20.0}, {"queue": 10}),
        # It ended at the gate: it was never ready.
        ({"finished": 20.0}, {"queue": 10}),
    ],
)
def test_phases_fill_the_time(times: dict[str, float], expected: dict[str, float]) -> None:
    assert phases(request(times)) == pytest.approx(expected, abs=1e-3)


def test_a_failed_request_says_so() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    reason = FinishReason(FinishType.ABORT, message="sampler raised", status=500)
    Figures.of(request(WHOLE, reason), lambda: NOW).write(provider.get_tracer("t"), PARENT)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"request", "gate", "queue", "prefill", "decode"}
    top = spans["request"]
    assert top.parent is not None
    assert f"{top.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert (top.status.is_ok, top.status.description) == (False, "sampler raised")
    assert top.attributes is not None
    assert top.attributes["pegboard.request_id"] == "mine"


@pytest.mark.parametrize(
    ("value", "address"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_addresses(value: str, address: str) -> None:
    assert TracingFields(otlp_traces_endpoint=value).otlp_traces_endpoint == address


@pytest.mark.parametrize(("value", "said"), [("c:4317", "http or https URL"), ("http://me:key@c", "HEADERS")])
def test_wrong_addresses(value: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TracingFields(otlp_traces_endpoint=value)


def hooks_of(endpoint: str | None) -> TracingHooks:
    resolved = compose(data={"model": {"path": "/m"}, "server": {"otlp_traces_endpoint": endpoint}}, env={})
    return TracingHooks(resolved.plugin_options["tracing_otel"])


def test_without_the_package_the_config_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the module, whose imports are the package's, could not be imported.
    monkeypatch.setitem(sys.modules, "pegboard.plugins.tracing_otel.tracing", None)
    hooks = hooks_of("http://c:4318")
    with pytest.raises(ConfigError, match=r"^server.otlp_traces_endpoint: .* pip install 'pegboard\[otel\]'"):
        hooks.configure()


def test_without_an_endpoint_there_is_nothing() -> None:
    hooks = hooks_of(None)
    hooks.configure()
    assert (hooks.pipeline_stages(), hooks.frontend_stages()) == ([], [])
    hooks.requests_finished([request(WHOLE)])
    hooks.shutdown()
