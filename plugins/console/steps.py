"""The last steps of the scheduler, noted while the console is looked at."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pegboard.core.interfaces.batch import ScheduleBatch
    from pegboard.core.interfaces.clock import Clock

KEPT = 200
"""Steps that are kept."""
NOTED_FOR = 10.0
"""Seconds for which steps are noted after each question about them."""

Row = tuple[int, str, float, float, int, int, int, int, int]
"""A step: its number, mode, when it was planned and committed (seconds of the scheduler's clock), its requests, those
that only decode, tokens of prompts computed, tokens ahead verified, and tokens gained.
"""


class Steps:
    """Notes a step in a few microseconds while there were questions about them lately, and else compares two numbers.

    `started` tells one scheduler from the one that is started in its place.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.started = time.time_ns()
        self._clock = clock
        self._until = -math.inf
        self._rows: deque[Row] = deque(maxlen=KEPT)
        self._number = 0

    def committed(self, batch: ScheduleBatch) -> None:
        """Note a step that is through."""
        if batch.committed_at > self._until:
            return
        self._number += 1
        requests, decoding = len(batch.reqs), batch.decoding
        ahead = gained = 0
        if batch.trees is not None:
            ahead = int(batch.extend_lens[requests - decoding :].sum()) - decoding
            gained = 0 if batch.gained is None else int(batch.gained.sum())
        elif batch.tokens is not None:
            gained = batch.tokens.shape[0]
        prompts = batch.prompt_tokens if decoding < requests else 0
        mode = batch.forward_mode.name.lower()
        times = (batch.planned_at, batch.committed_at)
        self._rows.append((self._number, mode, *times, requests, decoding, prompts, ahead, gained))

    def since(self, number: int) -> list[Row]:
        """Return the steps after this one, as far as they are kept, and note those of the next seconds."""
        self._until = self._clock() + NOTED_FOR
        return [row for row in self._rows if row[0] > number]
