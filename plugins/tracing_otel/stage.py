"""In the scheduler: what a request is below in its trace, kept until it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.req import ReqSlot
from pegboard.core.interfaces.stage import Interest, Stage

if TYPE_CHECKING:
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.tracing_otel.outbox import Outbox

NAME = "tracing_otel"

PARENT: ReqSlot[dict[str, str]] = ReqSlot(dict)
"""The headers that name the span above: `traceparent`, perhaps `tracestate`. Requests that are not traced have none."""


class TraceStage(Stage):
    """Keeps the span above each request; no step asks it for anything."""

    name = NAME

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        if (feature := message.features.get(self.name)) is None:
            return None
        PARENT.of(req).update(msgspec.msgpack.decode(feature, type=dict[str, str]))
        return Interest(look=False)

    def figures(self) -> dict[str, float]:
        return {f"spans_{outcome}_total": count for outcome, count in self._outbox.counts.items()}
