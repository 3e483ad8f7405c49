"""The outbox: bounded, counted, and waited for by nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from pegboard.plugins.tracing_otel import outbox
from pegboard.plugins.tracing_otel.outbox import Outbox


class Exporter:
    """Sends where it may: `open` lets it, `result` is what it answers."""

    def __init__(self, result: SpanExportResult | Exception = SpanExportResult.SUCCESS) -> None:
        self.result = result
        self.sent: list[str] = []
        self.open, self.busy, self.ended = threading.Event(), threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.busy.set()
        assert self.open.wait(60)
        if isinstance(self.result, Exception):
            raise self.result
        self.sent += [span.name for span in spans]
        return self.result

    def shutdown(self) -> None:
        self.ended.set()
        self.open.set()


def span(outbox: Outbox, name: str) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(outbox)
    provider.get_tracer("t").start_span(name).end()


def test_spans_and_what_makes_them_are_sent_together() -> None:
    exporter = Exporter()
    box = Outbox(exporter, "there", gather_s=60)  # until it is closed
    exporter.open.set()
    span(box, "a")

    def two() -> None:
        span(box, "b")
        span(box, "c")

    box.put(two, 2)
    box.close()
    box.close()
    assert exporter.sent == ["a", "b", "c"]
    assert box.counts == {"sent": 3, "failed": 0, "dropped": 0}


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, OSError("away")])
def test_what_is_not_taken_is_counted_and_said_once(
    result: SpanExportResult | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Exporter(result)
    exporter.open.set()
    box = Outbox(exporter, "there", gather_s=0)
    for _ in range(3):
        span(box, "a")
    box.close()
    assert box.counts == {"sent": 0, "failed": 3, "dropped": 0}
    assert caplog.text.count("traces are not taken by there") == 1


def test_a_full_queue_drops_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "QUEUED", 4)
    exporter = Exporter()
    box = Outbox(exporter, "there", gather_s=0)
    span(box, "first")
    assert exporter.busy.wait(60)  # the thread is stuck with a collector that does not answer
    for _ in range(4):
        span(box, "queued")
    box.put(lambda: None, 5)
    span(box, "dropped")
    assert box.counts["dropped"] == 6
    exporter.open.set()
    box.close()
    assert exporter.sent == ["first", *4 * ["queued"]]
    assert box.counts == {"sent": 5, "failed": 0, "dropped": 6}


def test_the_end_waits_a_moment_for_a_collector_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "LAST_S", 0.01)
    exporter = Exporter(SpanExportResult.FAILURE)
    box = Outbox(exporter, "there", gather_s=0)
    span(box, "a")
    assert exporter.busy.wait(60)
    box.close()
    assert exporter.ended.is_set()


def test_what_cannot_be_made_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Exporter()
    exporter.open.set()
    box = Outbox(exporter, "there", gather_s=60)
    box.put(lambda: 1 // 0)
    span(box, "a")
    box.close()
    assert exporter.sent == ["a"]
    assert "could not be made" in caplog.text
