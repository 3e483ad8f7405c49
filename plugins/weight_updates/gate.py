"""The gate of all requests: KV of other weights is kept apart from theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pegboard.core.interfaces.admission_gate import (
    OPEN,
    AdmissionGate,
    AdmissionGateContext,
    GateOptions,
    GateState,
    Verdict,
)

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req


class EpochGate(AdmissionGate[GateOptions]):
    """Is always open. `epoch` names the weights of now; "" stands for those of the start."""

    def __init__(self, options: GateOptions, ctx: AdmissionGateContext, epoch: Callable[[], str]) -> None:
        super().__init__(options, ctx)
        self._epoch = epoch

    def concerns(self, req: Req) -> bool:
        return True

    def enter(self, req: Req) -> Verdict:
        epoch = self._epoch()
        return Verdict(GateState.OPEN, namespace=epoch) if epoch else OPEN
