"""Receive: messages to the scheduler, each answered at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.messages import (
    AbortRequest,
    Accepted,
    ControlReply,
    ControlRequest,
    FromScheduler,
    Rejected,
    TokenizedBatch,
    TokenizedRequest,
    ToScheduler,
)
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.arrivals import QueueBounds, bad_length, new_req, refusal
from pegboard.toolkit.system.blame import in_words
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.engine_view import Answer, Control, Later
    from pegboard.core.interfaces.req import Req
    from pegboard.core.pipeline.components import Components, Limits
    from pegboard.core.pipeline.counters import Counters
    from pegboard.core.pipeline.lifecycle import Lifecycle

logger = logging.getLogger(__name__)


class Reception:
    """Accepts or refuses requests, aborts them, and runs control actions."""

    def __init__(
        self,
        requests: Lifecycle,
        components: Components,
        limits: Limits,
        bounds: QueueBounds,
        counters: Counters,
        seed: int,
        clock: Clock,
    ) -> None:
        self.bounds = bounds
        self.controls: dict[str, Control] = {"flush_cache": self._flush_cache, "drain": self._drain}
        """What `ControlRequest.action` may name; plugins add theirs through `EngineView.add_control`."""
        self.later: dict[int, tuple[str, Later]] = {}
        """Control actions that have not answered yet, by the ids of their calls."""
        self._requests = requests
        self._components = components
        self._limits = limits
        self._counters = counters
        self._draining = False
        self._rng = np.random.default_rng(seed)
        self._clock = clock

    def receive(self, messages: Iterable[ToScheduler]) -> list[FromScheduler]:
        """Take messages. Requests are answered Accepted or Rejected, control calls with a ControlReply, in time."""
        replies: list[FromScheduler] = []
        for message in messages:
            if isinstance(message, TokenizedRequest):
                replies.append(self._accept(message))
            elif isinstance(message, TokenizedBatch):
                replies.extend(self._accept(one) for one in message.requests)
            elif isinstance(message, AbortRequest):
                self.abort(message)
            elif isinstance(message, ControlRequest):
                replies += self._control(message.call_id, message.action, partial(self._run, message))
        if self.later:
            for call_id, (action, later) in list(self.later.items()):
                replies += self._control(call_id, action, later.poll)
        return replies

    def _accept(self, message: TokenizedRequest) -> Accepted | Rejected:
        refused = self._refusal(message)
        if refused is None:
            req = new_req(message, self._limits.eos_ids, self._rng, self._clock())
            refused = self._examine(req, message)
        if refused is not None:
            self._counters.rejected += 1
            return refused
        self._counters.accepted += 1
        self._requests.begin(req)
        return Accepted(rid=req.rid)

    def _refusal(self, message: TokenizedRequest) -> Rejected | None:
        """Return why the message alone, or the state of the queue, forbids the request."""
        alive, gates = self._requests.alive, self._components.gates
        if self._draining:
            return refusal(message, 503, "shutting_down", "the server is shutting down, try another one")
        if message.rid in alive:
            return refusal(message, 400, "duplicate_rid", f"the request {message.rid!r} is still running", param="rid")
        held = 0 if gates is None else gates.held
        return bad_length(message, self._limits.max_context_len) or self.bounds.refuse(
            message, len(alive) - held, self._requests.prompt_tokens
        )

    def _examine(self, req: Req, message: TokenizedRequest) -> Rejected | None:
        """Give plugins their first look at a request. What they raise fails this request alone."""
        components = self._components
        try:
            req.flags = components.builder.flags(req)
        except InvalidRequest as error:
            return refusal(message, error.status, error.code, error.message, param=error.param or "")
        except Exception as error:
            return self._plugin_failed(message, "a logits processor or the sampler", error)
        try:
            components.points.arrive(req, message)
        except InvalidRequest as error:
            return refusal(message, error.status, error.code, error.message, param=error.param or "")
        except Exception as error:
            return self._plugin_failed(message, "a stage", error)
        failed = None if components.gates is None else components.gates.arrive(req)
        if failed is not None:
            components.points.gone(req)
            return refusal(message, failed.status, failed.code, failed.reason, param=failed.param)
        return None

    def _plugin_failed(self, message: TokenizedRequest, which: str, error: Exception) -> Rejected:
        """Refuse a new request on which a plugin raised."""
        culprits = self._components.culprits
        culprit = culprits.of(error)
        culprits.count(culprit)
        text = f"{which} failed: {in_words(error)}" if culprit is None else culprit.tell(error)
        accused = text if culprit is None else culprit.accuse(error)
        logger.error("request %s is refused: %s", quoted(message.rid), accused, exc_info=error)
        return refusal(message, 500, "plugin_failed", text)

    def abort(self, message: AbortRequest) -> None:
        """End the requests that are meant; one that has ended already is left alone."""
        reason = FinishReason(FinishType.ABORT, message="aborted by the client", status=499)
        alive = self._requests.alive
        targets = list(alive.values()) if message.all_requests else [alive.get(message.rid)]
        for req in targets:
            if req is not None:
                self._requests.end(req, reason)

    def _run(self, message: ControlRequest) -> Answer:
        run = self.controls.get(message.action)
        if run is None:
            raise InvalidRequest(f"unknown control action {message.action!r}", code="unknown_action", status=404)
        return run(message.args)

    def _control(self, call_id: int, action: str, run: Callable[[], Answer | None]) -> list[ControlReply]:
        """Return the reply to a call, if what is run for it now gives one."""
        try:
            found = run()
            if isinstance(found, dict):
                self.later.pop(call_id, None)
                return [ControlReply(call_id=call_id, ok=True, payload=found)]
            if found is not None:
                self.later[call_id] = action, found
            return []
        except InvalidRequest as error:
            problem = {"message": str(error), "status": error.status, "code": error.code, "param": error.param}
        except Exception as error:
            logger.exception("the control action %r failed", action)
            text = f"{action} failed: {in_words(error)}"
            problem = {"message": text, "status": 500, "code": "control_failed"}
        self.later.pop(call_id, None)
        return [ControlReply(call_id=call_id, ok=False, payload=problem)]

    def _flush_cache(self, args: dict[str, object]) -> dict[str, object]:
        if self._requests.alive:
            raise InvalidRequest("requests are waiting or running, so the cache is in use", code="busy", status=409)
        self._components.memory.cache.reset()
        return {}

    def _drain(self, args: dict[str, object]) -> dict[str, object]:
        self._draining = True
        return {}
