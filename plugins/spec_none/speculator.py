"""The speculator that never drafts."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.core.interfaces.speculator import DraftRow, DraftTrees, Speculator
from pegboard.toolkit.speculation.tree import chains


class NoSpeculator(Speculator):
    """Proposes nothing."""

    max_nodes = 1

    def propose(self, rows: Sequence[DraftRow]) -> DraftTrees:
        return chains((int(row.tokens[-1]), ()) for row in rows)
