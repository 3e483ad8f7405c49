"""In the process that takes requests: what an API says of a budget is checked, and its texts become tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.client import EmbedRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.frontend import FrontendStage
from pegboard.plugins.thinking_budget.messages import NAME, Asked, Budget
from pegboard.toolkit.chat.thinking import BUDGET

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import GenerateRequest, ModelInfo
    from pegboard.core.interfaces.tokenizer import Tokenizer

_PARAM = f"params.{BUDGET}"


class BudgetFrontend(FrontendStage):
    name = NAME

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prepare(self, request: GenerateRequest | EmbedRequest, length: int, info: ModelInfo) -> Asked | None:
        said = request.params.get(BUDGET)
        if said is None or isinstance(request, EmbedRequest):
            return None
        try:
            budget = msgspec.convert(said, Budget)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{_PARAM}: {error}", param=_PARAM) from None
        closes = tuple(tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in budget.closes)
        if not all(closes):
            raise InvalidRequest(f"{_PARAM}: this model has no tokens for closes", param=_PARAM)
        return Asked(
            begin=budget.begin,
            ends=budget.ends,
            opened=budget.opened,
            answer=budget.answer,
            text=budget.text,
            tokens=budget.tokens,
            closes=closes,
        )
