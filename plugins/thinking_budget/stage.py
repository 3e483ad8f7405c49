"""In the scheduler: requests with a budget get what binds them once all else that binds them is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.admission_gate import OPEN, AdmissionGate, AdmissionGateContext, GateOptions, Verdict
from pegboard.core.interfaces.constraint import constrain, constraint_of
from pegboard.core.interfaces.req import Req, ReqSlot
from pegboard.core.interfaces.stage import Interest, Stage
from pegboard.plugins.thinking_budget.constraint import BesideAnother, BudgetConstraint
from pegboard.plugins.thinking_budget.messages import NAME, Asked
from pegboard.toolkit.chat.thinking import BUDGET

if TYPE_CHECKING:
    from pegboard.core.interfaces.messages import TokenizedRequest
    from pegboard.toolkit.text.detokenize import TokenDecoder

_ASKED: ReqSlot[list[Asked]] = ReqSlot(list)


class ThinkingBudget(Stage):
    """Takes part in requests with a budget. `vocab_size` is the width of the logits."""

    name = NAME
    offers = (BUDGET,)

    def __init__(self, tokenizer: TokenDecoder, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._words = -(-vocab_size // 32)

    def gate(self, ctx: AdmissionGateContext) -> AdmissionGate:
        return BudgetGate(GateOptions(), ctx, self._tokenizer, self._words)

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        feature = message.features.get(self.name)
        if feature is None:
            return None
        _ASKED.of(req).append(msgspec.msgpack.decode(feature, type=Asked))
        return Interest(look=False, constrained=True)


class BudgetGate(AdmissionGate[GateOptions]):
    """Is open for all. It stands after the grammars' gate, so that a request's grammar is known."""

    def __init__(self, options: GateOptions, ctx: AdmissionGateContext, tokenizer: TokenDecoder, words: int) -> None:
        super().__init__(options, ctx)
        self._tokenizer, self._words = tokenizer, words

    def concerns(self, req: Req) -> bool:
        return _ASKED.peek(req) is not None

    def enter(self, req: Req) -> Verdict:
        budget = BudgetConstraint(req, _ASKED.of(req)[0], self._tokenizer, self._words)
        other = constraint_of(req)
        constrain(req, budget if other is None else BesideAnother(budget, other))
        return OPEN
