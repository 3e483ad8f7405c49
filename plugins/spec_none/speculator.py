"""The speculator that never drafts."""

from __future__ import annotations

from collections.abc import Sequence

from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.api import DraftRow, Speculator
from pegboard.toolkit.sampling.tree import chains


class NoSpeculator(Speculator):
    """Proposes nothing."""

    max_nodes = 1

    def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
        return chains((int(row.tokens[-1]), ()) for row in rows)
