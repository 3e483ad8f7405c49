"""Judge: the part of a speculator that decides which drafts stand, in the worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from pegboard.core.interfaces.trees import Accepted
from pegboard.plugins.speculation.messages import MAX_FAILURES, worth_telling
from pegboard.toolkit.sampling import tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.sampling import SamplingBatch
    from pegboard.core.interfaces.trees import TokenTrees
    from pegboard.plugins.speculation.api import Speculator

logger = logging.getLogger(__name__)


class Judge:
    """Asks a speculator which drafts stand, and checks what it says. If it fails, the step's tokens are those that were
    drawn. After several failures in a row the speculator goes on drafting, but is not asked any more. `count` counts
    them.
    """

    def __init__(self, speculator: Speculator, count: Callable[[object], None], name: str = "") -> None:
        self.name = name or type(speculator).__name__
        self._count = count
        self._failures = 0
        self._speculator = speculator
        self._in_a_row = 0

    @property
    def on(self) -> bool:
        """Whether the speculator is still asked."""
        return self._in_a_row < MAX_FAILURES

    def accept(
        self,
        trees: TokenTrees,
        drawn: NDArray[np.int64],
        logits: torch.Tensor,
        sampling: SamplingBatch,
        rows: NDArray[np.int64],
    ) -> Accepted:
        """Return what stands by `Speculator.accept`, or else by the tokens `drawn` int64 [nodes]."""
        try:
            found = self._speculator.accept(trees, logits, sampling, rows)
            wrong = _fault(trees, found, logits)
        except Exception:
            self._failed("raised")
            return tree.walk(trees, drawn)
        if wrong is not None:
            self._failed(wrong)
            return tree.walk(trees, drawn)
        self._in_a_row = 0
        tokens = found.tokens.copy()
        # There was nothing to judge: what a request without drafts gets must not depend on those of others.
        alone = np.flatnonzero(trees.counts == 1)
        tokens[np.cumsum(found.counts)[alone] - 1] = drawn[tree.starts(trees.counts)[alone]]
        return Accepted(found.counts.copy(), found.nodes.copy(), tokens)

    def _failed(self, what: str) -> None:
        self._count(self._speculator)
        self._failures += 1
        self._in_a_row += 1
        if self._in_a_row == 1 and worth_telling(self._failures):
            text = "the speculator %r failed (accept): %s; the step's tokens are those that were drawn"
            logger.error(text, self.name, what, exc_info=what == "raised")
        if not self.on:
            text = "the speculator %r failed %d times in a row: it does not judge any more"
            logger.error(text, self.name, MAX_FAILURES)


def _fault(trees: TokenTrees, found: Accepted, logits: torch.Tensor) -> str | None:
    """Return what is wrong with an answer."""
    wrong = tree.accepted_fault(trees, found, logits.shape[1])
    if wrong is not None:
        return wrong
    allowed = logits[_index(found.nodes, logits), _index(found.tokens, logits)] > -torch.inf
    return None if bool(allowed.all()) else "a token is gained that the logits rule out"


def _index(places: NDArray[np.int64], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(places).to(like.device)
