"""How stages end requests: by reasons that are asked after each token."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pegboard.core.interfaces.messages import TokenizedRequest
from pegboard.core.interfaces.req import Req
from pegboard.core.interfaces.stage import Interest, Stage
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.interfaces.stops import Ending
from tests.core.pipeline.harness import IGNORE, Harness

LOOPS = pytest.mark.parametrize("loop", ["normal", "overlap"])


class AtTheThird:
    """Ends a request at its third token."""

    def after(self, req: Req, token: int) -> FinishReason | None:
        return FinishReason(FinishType.STOP, matched=token) if req.output_len >= 3 else None


class Finishes(Stage):
    name = "test.finishes"

    def __init__(self, look: bool) -> None:
        self.look = look

    def arrive(self, req: Req, message: TokenizedRequest) -> Interest | None:
        return Interest(look=self.look)

    def finishers(self, req: Req) -> Iterable[Ending]:
        return [AtTheThird()]


@LOOPS
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_finishers_are_asked_after_each_token(loop: str, look: bool, stream: bool) -> None:
    harness = Harness(loop=loop, joining=[Finishes(look)])
    harness.submit("a", [1] * 9, 20, stream=stream, **IGNORE)
    harness.run()
    assert len(harness.tokens("a")) == 3
    assert harness.finish("a")["type"] == "stop"
