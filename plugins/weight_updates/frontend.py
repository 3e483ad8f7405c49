"""In the process that takes requests: what is known of the weights, and which answers came from which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from pegboard.core.interfaces.frontend import FrontendStage
from pegboard.plugins.weight_updates.messages import NAME
from pegboard.toolkit.http.weight_version import ServedWeights

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import ModelInfo, OutputChunk
    from pegboard.plugins.weight_updates.uploads import Uploads


class WeightFrontend(FrontendStage):
    """Puts the version of the weights into what answers have from stages, once it is another than that of the start.
    Closes `uploads`.
    """

    name = NAME

    def __init__(self, known: ServedWeights, uploads: Uploads) -> None:
        self._known = known
        self._uploads = uploads

    def service(self, info: ModelInfo) -> ServedWeights:
        """Return what is known, from the engine's start on."""
        self._known.learn(info.stages[NAME]["version"])
        return self._known

    def finish(self, chunk: OutputChunk, whole: msgspec.Raw | None, rows: Sequence[msgspec.Raw]) -> None:
        if whole is not None:
            chunk.extra = {**(chunk.extra or {}), **msgspec.msgpack.decode(whole, type=dict[str, str])}

    def close(self) -> None:
        self._uploads.close()
