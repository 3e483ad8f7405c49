"""PrefillInParts: the stage that brings the source of split prefills."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegboard.core.interfaces.stage import Stage
from pegboard.plugins.prefill_in_parts.source import SplitPrefill

if TYPE_CHECKING:
    from pegboard.core.interfaces.step import CoreServices


class PrefillInParts(Stage):
    """Has prefills of `num_layers` layers run `layers` at a time."""

    name = "prefill_in_parts"
    splits = True

    def __init__(self, layers: int, num_layers: int) -> None:
        self._layers = layers
        self._num_layers = num_layers

    def sources(self, core: CoreServices) -> tuple[SplitPrefill]:
        return (SplitPrefill(core, self._layers, self._num_layers),)
