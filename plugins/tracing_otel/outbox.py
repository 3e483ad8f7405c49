"""What has ended is put here and is sent to the collector by a thread, which nothing waits for."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExportResult

logger = logging.getLogger(__name__)

QUEUED = 2048
"""Most entries that wait, each a span or the making of those of a request."""
BATCH = 512
"""Most entries that are sent together."""
GATHER_S = 1.0
"""How long the first entry of a batch waits for others."""
LAST_S = 1.0
"""How long a process that ends gives the collector to take what is left; and once more for a try to be given up."""

Made: TypeAlias = Callable[[], object]
"""Starts and ends spans, which comes back as calls of `on_end`."""


class Exporter(Protocol):
    """The part of OpenTelemetry's SpanExporter that is needed."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult: ...
    def shutdown(self) -> None: ...


class Outbox(SpanProcessor):
    """A queue of bounded length, and a daemon thread that makes and sends spans.

    `counts` are spans by what became of them: "sent", "failed" (the collector refused them, or did not answer) and
    "dropped" (the queue was full).
    """

    def __init__(self, exporter: Exporter, address: str, *, gather_s: float = GATHER_S) -> None:
        self.counts = {"sent": 0, "failed": 0, "dropped": 0}
        self._exporter, self._address, self._gather_s = exporter, address, gather_s
        self._queue: queue.Queue[ReadableSpan | Made] = queue.Queue(QUEUED)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._spans: list[ReadableSpan] = []
        self._reachable = True

    def put(self, entry: ReadableSpan | Made, spans: int = 1) -> None:
        """Leave a span, or what makes so many `spans`. Never waits: without room they are dropped, and counted."""
        if self._thread is None:
            self._start()
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            with self._lock:
                self.counts["dropped"] += spans

    def on_end(self, span: ReadableSpan) -> None:
        """Take a span that has ended."""
        if not span.context.trace_flags.sampled:
            return
        if threading.current_thread() is self._thread:
            self._spans.append(span)
        else:
            self.put(span)

    def close(self) -> None:
        """Send what is left, for twice LAST_S seconds at most. May be called twice."""
        if self._closing.is_set():
            return
        self._closing.set()
        self.put(lambda: None, 0)  # wakes the thread
        assert self._thread is not None
        self._thread.join(LAST_S)
        # Ends the waiting between two tries, too.
        self._exporter.shutdown()
        self._thread.join(LAST_S)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            self._take(self._queue.get())
            self._closing.wait(self._gather_s)
            with contextlib.suppress(queue.Empty):
                for _ in range(BATCH - 1):
                    self._take(self._queue.get_nowait())
            self._send()

    def _take(self, entry: ReadableSpan | Made) -> None:
        if isinstance(entry, ReadableSpan):
            self._spans.append(entry)
            return
        try:
            entry()
        except Exception:
            logger.exception("spans of a request could not be made")

    def _send(self) -> None:
        spans, self._spans = self._spans, []
        if not spans:
            return
        try:
            sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:
            logger.debug("the exporter raised: %r", error)
            sent = False
        self.counts["sent" if sent else "failed"] += len(spans)
        if sent is not self._reachable:
            self._reachable = sent
            if sent:
                logger.info("traces are taken by %s again", self._address)
            else:
                logger.warning("traces are not taken by %s; spans are counted as failed until they are", self._address)
