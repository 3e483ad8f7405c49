"""A speculator that drafts on the device, as one that proposes: the passes of the model that it needs happen before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pegboard.core.interfaces.sampling import SamplingParams
from pegboard.core.interfaces.trees import TokenTrees
from pegboard.plugins.speculation.api import DraftRow, Speculator
from pegboard.plugins.speculation.suite.bench import Bench, Part, Request
from pegboard.plugins.speculation.suite.checks import VOCAB, check_trees
from pegboard.toolkit.sampling import tree


class DeviceRig(Speculator):
    """Sees to it that a request has a row, that all of its tokens but the newest are computed, and that the speculator
    has seen it. A request that lost its row to another one is computed anew. Media have ids within the vocabulary, as
    they have in the model's input.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench, self.made = bench, bench.speculator
        super().__init__(self.made.options, self.made.ctx)
        self.max_nodes = self.made.max_nodes

    def concerns(self, params: SamplingParams) -> bool:
        return self.made.concerns(params)

    def propose(self, rows: Sequence[DraftRow]) -> TokenTrees:
        found = [tree.chains([(int(row.tokens[-1]), ())]) for row in rows]
        # One token alone is a prompt that is not computed, and nothing is drafted for it yet.
        asked = [place for place, row in enumerate(rows) if len(row.tokens) > 1]
        if not asked:
            return tree.join(found)
        requests = self._requests([rows[place] for place in asked])
        due = [Part(request, len(request.text) - 1) for request in requests if request.computed < len(request.text) - 1]
        if due:
            self.bench.run(due)
        trees = self.bench.draft(requests, [rows[place].most for place in asked])
        check_trees(trees, [int(rows[place].tokens[-1]) for place in asked], [rows[place].most for place in asked])
        self.max_nodes = self.made.max_nodes
        if len(asked) == len(rows):
            return trees
        for index, place in enumerate(asked):
            found[place] = tree.take_part(trees, np.array([index]))
        return tree.join(found)

    def learn(self, rows: Sequence[DraftRow], offered: NDArray[np.int64], gained: NDArray[np.int64]) -> None:
        self.made.learn(rows, offered, gained)
        self.max_nodes = self.made.max_nodes

    def _requests(self, rows: Sequence[DraftRow]) -> list[Request]:
        """Return the requests of rows, each with a row of its own."""
        found: list[Request] = []
        for row in rows:
            request = row.memo.setdefault(self, Request(np.empty(0, np.int64)))
            request.text = np.minimum(row.tokens, VOCAB - 1)
            found.append(request)
        for request in found:
            if request.row == 0:
                self.bench.seat(request, keep=found)
        return found
