"""What becomes of a request whose grammar's backend fails."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.toolkit.system.blame import text_of
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req

logger = logging.getLogger(__name__)


def failure_of(req: Req, error: BaseException) -> FinishReason:
    """Return how a request ends if the grammar backend's code raised. A panic in Rust is a BaseException only."""
    let_through(error)
    if isinstance(error, InvalidRequest):
        status, code = error.status, error.code
    else:
        logger.error("the grammar of %s failed", quoted(req.name), exc_info=error)
        status, code = 500, "grammar_failed"
    return FinishReason(FinishType.ABORT, message=f"the grammar failed: {text_of(error)}", status=status, code=code)


def let_through(error: BaseException) -> None:
    """Re-raise KeyboardInterrupt and SystemExit."""
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        raise error
