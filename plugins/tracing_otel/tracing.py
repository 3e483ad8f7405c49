"""Spans of requests: that of the HTTP request in the API process, those of the engine in the scheduler's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pegboard.plugins.tracing_otel.outbox import Exporter, Outbox

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from pegboard.core.interfaces.req import Req

GATE_S = 0.001
"""A gate that let the request pass sooner has no span."""

PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """Makes spans, and hands them to an outbox. `service` is what OTEL_SERVICE_NAME is by default."""

    def __init__(self, address: str, exporter: Exporter | None = None, service: str = "pegboard") -> None:
        # It would log each try. The outbox says when sending begins to fail, and when it works again.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self.outbox = Outbox(exporter or OTLPSpanExporter(address), address)
        named = OTELResourceDetector().detect().attributes.get(SERVICE_NAME, service)
        provider = TracerProvider(resource=Resource.create({SERVICE_NAME: named}), shutdown_on_exit=False)
        provider.add_span_processor(self.outbox)
        self.tracer = provider.get_tracer("pegboard")

    def finished(self, req: Req, parent: dict[str, str]) -> None:
        """Leave the spans of a request that has ended. Costs a copy of its figures; a thread does the rest."""
        figures = Figures.of(req)
        self.outbox.put(lambda: figures.write(self.tracer, parent), 1 + len(figures.phases))


@dataclass(frozen=True, slots=True)
class Figures:
    """A request that has ended: phases as (name, begin, end), in nanoseconds of Unix time, and what spans say of it."""

    phases: tuple[tuple[str, int, int], ...]
    attributes: dict[str, str | int | tuple[str, ...]]
    error: str

    @classmethod
    def of(cls, req: Req, clock: Callable[[], float] = time.monotonic) -> Figures:
        """Return those of a request. `clock` is the one that it is stamped by."""
        times, out, reason = req.timing, req.output, req.output.finish_reason
        offset, end = time.time() - clock(), times.finished or clock()
        ready = times.ready or times.arrived
        begun = [("queue", ready), ("prefill", times.first_scheduled), ("decode", times.first_token)]
        if ready - times.arrived >= GATE_S:
            begun.insert(0, ("gate", times.arrived))
        begun = [(name, at) for name, at in begun if at > 0]
        ends = [*(at for _, at in begun[1:]), end]
        phases = tuple(
            (name, _nanoseconds(at + offset), _nanoseconds(max(at, stop) + offset))
            for (name, at), stop in zip(begun, ends, strict=True)
        )
        attributes: dict[str, str | int | tuple[str, ...]] = {
            "gen_ai.request.model": req.model,
            "gen_ai.usage.input_tokens": req.input_len,
            "gen_ai.usage.output_tokens": req.output_len,
            "gen_ai.response.finish_reasons": ("abort" if reason is None else reason.type.value,),
            "pegboard.request_id": req.name,
            "pegboard.cached_tokens": out.cached_tokens,
            "pegboard.retractions": out.num_retractions,
        }
        return cls(phases, attributes, reason.message if reason is not None and reason.status >= 500 else "")

    def write(self, tracer: trace.Tracer, parent: dict[str, str]) -> None:
        """Start and end the span of the request, below the one that `parent` names, and one of each phase."""
        above: Context = PROPAGATOR.extract(parent)
        span = tracer.start_span("request", above, start_time=self.phases[0][1], attributes=self.attributes)
        if self.error:
            span.set_status(trace.StatusCode.ERROR, self.error)
        within = trace.set_span_in_context(span, above)
        for name, begin, end in self.phases:
            tracer.start_span(name, within, start_time=begin).end(end)
        span.end(self.phases[-1][2])


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
