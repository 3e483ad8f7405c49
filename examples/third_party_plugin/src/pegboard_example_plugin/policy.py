"""Shortest prompt first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces import SchedulePolicy

from pegboard_example_plugin.options import ShortestPromptOptions

if TYPE_CHECKING:
    from pegboard.core.interfaces import Req


class ShortestPromptPolicy(SchedulePolicy[ShortestPromptOptions]):
    """Many short questions are answered before one long one: the mean wait is shortest, the longest wait is not."""

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        return sorted(waiting, key=lambda req: req.seq_len // self.options.bucket)
