"""The stage between gates that hand KV over and the core: memory, requests that go on, and where KV lies."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pegboard.core.interfaces.req import NO_ROW
from pegboard.core.interfaces.stage import Interest, Stage
from pegboard.plugins.kv_handoff.arrived import why_unusable
from pegboard.toolkit.system.blame import in_words
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from pegboard.core.interfaces.kv_pool import KVPool
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stage import StepResult, StepView
    from pegboard.core.interfaces.step import AnySource, CoreServices
    from pegboard.plugins.kv_handoff.api.transfer import KVTransfer
    from pegboard.plugins.kv_handoff.arrived import Arrived

logger = logging.getLogger(__name__)

NAME = "kv_handoff"


class Follower(Protocol):
    """A gate, as far as it takes KV elsewhere (see `HandoffGate`)."""

    name: str

    def follows(self, req: Req) -> bool: ...

    def computed(self, req: Req, slots: NDArray[np.int32]) -> None: ...


class KVHandoff(Stage):
    """Tells gates where the KV of the requests lies that they follow, and lets those go on for which one has brought
    KV. A gate that hands KV over registers with `serve`, and is told of each request that it `follows`. `failed` counts
    a failure of a gate.
    """

    name = NAME

    def __init__(
        self,
        vocab_size: int,
        transfer: Callable[[KVPool], KVTransfer] | None = None,
        failed: Callable[[object], None] = lambda gate: None,
    ) -> None:
        self._vocab_size = vocab_size
        self._transfer = transfer
        self._failed = failed
        self._gates: list[Follower] = []
        self._following: dict[Req, list[Follower]] = {}
        self._told: set[Req] = set()
        """Those of which some gate has been told where their KV is."""
        self.core: CoreServices | None = None
        """Set when the scheduler is built, after its gates."""

    def sources(self, core: CoreServices) -> Iterable[AnySource]:
        self.core = core
        return ()

    def serve(self, gate: Follower) -> None:
        """Note a gate that hands KV over. Once, when it is built."""
        self._gates.append(gate)

    def transfer(self, pool: KVPool) -> KVTransfer:
        """Return the engine that moves KV of this pool, as the config chooses it: the same one whenever it is asked
        for. Raises ConfigError where none can work here. The gate that asks closes it.
        """
        assert self._transfer is not None, "the stage was made without an engine to choose"
        return self._transfer(pool)

    def first_rows(self, req: Req) -> Mapping[str, bytes]:
        """Return what stages send with a request's first token, by their names: it goes along with its KV."""
        return {} if self.core is None else self.core.first_rows(req)

    def join(self, req: Req, arrived: Arrived | None) -> bool:
        """Let a request go on that has passed all gates, with what one of them has brought. False: it waits for its
        turn, and finds in the cache what was brought of it.
        """
        core = self.core
        if core is None:
            return False  # there is no scheduler, so there is no memory
        reserved = req.kv.row != NO_ROW
        if arrived is None:
            if reserved:
                core.give_back(req)
            return False
        if problem := why_unusable(req, arrived, self._vocab_size, reserved=reserved):
            text = f"what a gate has brought for this request does not fit: {problem}"
            logger.error("what a gate has brought for %s does not fit: %s", quoted(req.name), problem)
            core.end([req], text, "gate_failed")
            return True
        if arrived.token is None:
            core.give_back(req, arrived.length)
            return False
        core.begin_computed(req, arrived.length, arrived.token, arrived.values)
        return True

    # ---- where KV lies ---------------------------------------------------------------------------------------------

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        gates = [gate for gate in self._gates if gate.follows(req)]
        if not gates:
            return None
        self._following[req] = gates
        return Interest()

    def commit(self, step: StepView, result: StepResult) -> None:
        core = self.core
        assert core is not None
        batch = step.batch
        if batch.forward_mode.is_decode:
            return
        prefilled = batch.reqs[: len(batch.reqs) - batch.decoding]
        for req, kv in zip(prefilled, step.kvs, strict=False):
            if req.flags & self.flag and req.kv is kv:
                self._told.add(req)
                if failed := self._tell(req, core.slots(req).astype(np.int32)):
                    core.end([req], failed, "gate_failed")

    def unplaced(self, req: Req) -> None:
        if req in self._told:
            self._told.discard(req)
            if not req.finished:
                self._tell(req, np.empty(0, np.int32))

    def gone(self, req: Req) -> None:
        self._following.pop(req, None)
        self._told.discard(req)

    def _tell(self, req: Req, slots: NDArray[np.int32]) -> str:
        """Tell the gates that follow a request where its KV is now. Return what the request ends with, where one of
        them raised.
        """
        failed = ""
        for gate in self._following[req]:
            try:
                gate.computed(req, slots)
            except Exception as error:
                self._failed(gate)
                told = in_words(error)
                logger.exception("the gate %r failed in computed of %s: %s", gate.name, quoted(req.name), told)
                failed = failed or f"the gate {gate.name!r} failed: {told}"
        return failed
