"""A running server: a client's trace is continued, and a collector that is away costs requests nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from pegboard.conformance.checkpoints import tiny_checkpoint
from pegboard.conformance.servers import Served, serving
from tests.plugins.tracing_otel.collector import Collector, attributes, collecting

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENTS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=7"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}


NOT_TAKEN = "traces are not taken by"


def wait_for(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def config(model: Path, endpoint: str) -> dict[str, object]:
    return {
        "model": {"path": str(model), "dtype": "float32", "served_name": "tiny"},
        "memory": {"max_total_tokens": 1024},
        "server": {"otlp_traces_endpoint": endpoint},
    }


ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OTEL_EXPORTER_OTLP_HEADERS": "x-token=abc"}


def complete(server: Served, headers: dict[str, str], **more: object) -> int:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True, "temperature": 0, **more}
    return httpx.post(f"{server.address}/v1/completions", json=body, headers=headers, timeout=60).status_code


def check_a_traced_request(collector: Collector) -> None:
    spans = {span.name: span for span in collector.wait(5)}
    assert set(spans) == {"POST /v1/completions", "request", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    http, request = spans["POST /v1/completions"], spans["request"]
    assert http.parent_span_id.hex() == SPAN
    assert request.parent_span_id == http.span_id
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {phase.parent_span_id for phase in phases} == {request.span_id}
    ends = [request.start_time_unix_nano, *(phase.end_time_unix_nano for phase in phases)]
    assert [phase.start_time_unix_nano for phase in phases] == ends[:-1]
    assert request.end_time_unix_nano == ends[-1]
    assert http.start_time_unix_nano <= request.start_time_unix_nano + 10**6  # clocks of two processes
    assert http.trace_state == request.trace_state == "vendor=7"
    about = attributes(request)
    assert (about["gen_ai.request.model"], about["gen_ai.usage.output_tokens"]) == ("tiny", 4)
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    assert "hello" not in str(about)
    assert attributes(http)["http.response.status_code"] == 200
    assert collector.services == {"pegboard"}
    assert all(headers["x-token"] == "abc" for headers in collector.headers)


@pytest.mark.slow
def test_traces_of_a_server(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    with collecting() as collector:
        with serving(config(model, collector.address), env=ENV) as server:
            # None of these has a span: not sampled, not a request for the engine, refused before it is one.
            assert complete(server, UNSAMPLED) == 200
            assert httpx.get(f"{server.address}/health").status_code == 200
            assert complete(server, CLIENTS, prompt="") == 400
            assert complete(server, CLIENTS) == 200
            check_a_traced_request(collector)
            # Two answers are two requests below one. Ended with the server: what is left is sent.
            assert complete(server, {}, n=2, stream=True) == 200
            assert "Traceback" not in server.log()
        later = collector.wait(14)[5:]
        assert sorted(span.name for span in later) == sorted(
            ["POST /v1/completions", *2 * ["request", "queue", "prefill", "decode"]]
        )
        assert len({span.trace_id for span in later} | {bytes.fromhex(TRACE)}) == 2
        (http,) = (span for span in later if span.name == "POST /v1/completions")
        assert http.parent_span_id == b""
        assert {span.parent_span_id for span in later if span.name == "request"} == {http.span_id}


@pytest.mark.slow
def test_a_collector_that_is_away(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    with collecting() as collector:
        collector.status = 400  # refused for good: it is not tried again
        with serving(config(model, collector.address), env=ENV) as server:
            for _ in range(3):
                assert complete(server, CLIENTS) == 200
            wait_for(lambda: server.log().count(NOT_TAKEN) == 2)  # once per process
            page = httpx.get(f"{server.address}/metrics").text
            assert 'pegboard_trace_spans_total{outcome="sent"} 0.0' in page
            assert 'pegboard_trace_spans_total{outcome="failed"} 0.0' not in page
        assert server.process.returncode == 0
