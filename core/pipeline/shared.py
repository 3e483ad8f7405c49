"""CommonPrefix: how much KV all running requests share, slot by slot, so that attention may read it once for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.pipeline.running import NEVER

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.pipeline.running import RunningBatch
    from pegboard.toolkit.cache.req_to_token import ReqToTokenPool

_FIRST_LOOK = 16
"""Pages that are compared first: most batches have nothing in common, and that is seen soon."""


class CommonPrefix:
    """Finds it in the row table when the running batch has changed; while the same requests run, it stays.

    It counts only where `least` tokens of KV or more need not be read: its own, for all requests but one.
    """

    def __init__(self, rows: ReqToTokenPool, page_size: int, least: int = 1) -> None:
        self._rows = rows
        self._page_size = page_size
        self._least = least
        self._version = NEVER
        self._found = 0

    def of(self, running: RunningBatch) -> int:
        """Return the tokens, in whole pages, that the first slots of all running requests are the same for. Each has at
        least one more. 0 where too little is saved, as always for a request alone.
        """
        if self._version != running.version:
            self._version = running.version
            others = len(running.rows) - 1
            found = 0
            if others and (shortest := int(running.known_lens.min())) * others >= self._least:
                found = self._find(running.rows, shortest)
            self._found = found if found * others >= self._least else 0
        return self._found

    def _find(self, rows: NDArray[np.int64], shortest: int) -> int:
        page = self._page_size
        most = (shortest - 1) // page * page
        start, width = 0, _FIRST_LOOK * page
        while start < most:
            stop = min(start + width, most)
            table = self._rows.host[rows, start:stop]
            differs = (table != table[0]).any(axis=0)
            if differs.any():
                return (start + int(differs.argmax())) // page * page
            start, width = stop, 4 * width
        return most
