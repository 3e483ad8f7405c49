"""In the process that takes requests: figures of drafts, put into answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.frontend import FrontendStage
from pegboard.plugins.speculation.messages import NAME, Said

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import OutputChunk


class SpeculationFrontend(FrontendStage):
    name = NAME

    def finish(self, chunk: OutputChunk, whole: msgspec.Raw | None, rows: Sequence[msgspec.Raw]) -> None:
        if whole is not None:
            said = msgspec.msgpack.decode(whole, type=Said)
            chunk.drafted_tokens, chunk.accepted_tokens = said.drafted, said.accepted
