"""A collector of traces for tests: OTLP over HTTP, decoded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """What arrived at `address`. `status` is what it answers; `wait` blocks until so many spans are there."""

    address: str = ""
    status: int = 200
    services: set[str] = field(default_factory=set)
    headers: list[dict[str, str]] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, data: bytes, headers: dict[str, str]) -> None:
        request = ExportTraceServiceRequest.FromString(data)
        with self._changed:
            if self.status == 200:
                self.headers.append(headers)
                for resource in request.resource_spans:
                    about = {one.key: one.value.string_value for one in resource.resource.attributes}
                    self.services.add(about["service.name"])
                    for scope in resource.scope_spans:
                        self._spans += scope.spans
            self._changed.notify_all()

    def wait(self, count: int, seconds: float = 60) -> list[Span]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._spans) >= count, seconds), [one.name for one in self._spans]
            return list(self._spans)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            found.take(data, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(found.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Writes nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        # A connection that an exporter keeps open is not waited for.
        server.daemon_threads, server.block_on_close = True, False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        found.address = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Span) -> dict[str, Any]:
    """Return a span's attributes as plain values."""
    found: dict[str, Any] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, str(kind))
        found[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found
