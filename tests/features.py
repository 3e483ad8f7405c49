"""What the frontend stages of built-in plugins do, for tests without a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pegboard.conformance.fake_client import FakeEngineClient
from pegboard.core.frontend.features import Features
from pegboard.core.interfaces.frontend import Price
from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.plugins.grammar.frontend import GrammarFrontend
from pegboard.plugins.row_outputs.frontend import RowFrontend
from pegboard.plugins.stop_expressions.stage import ExpressionFrontend

FEATURES = Features([RowFrontend(), ExpressionFrontend(), GrammarFrontend()])


def prices(hidden_size: int) -> Callable[[TokenizedRequest], Price]:
    """What answers of a model with hidden states of this size cost."""
    info = replace(FakeEngineClient().info, hidden_size=hidden_size)
    return lambda message: FEATURES.price(message, info)
