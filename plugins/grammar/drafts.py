"""Drafts of an output with a grammar: which of them it allows, and what may come after each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.constraint import NodeMasks
from pegboard.plugins.grammar.state import allow_ends, new_matcher

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.grammar.state import GrammarState


class DraftWalk:
    """Brings a request's matcher to each node of its tree in turn, and back to where it was. The request may get
    `remaining` more tokens.

    A draft is cut, with all below it, where the grammar forbids it or the output would end with it, and where the
    grammar forces `jump_ahead` tokens or more after it (0: never): these are taken without asking the model.
    """

    def __init__(
        self,
        req: Req,
        state: GrammarState,
        tree: tuple[Sequence[int], Sequence[int]],
        remaining: int,
        jump_ahead: int,
    ) -> None:
        self._req = req
        self._state = state
        self._tokens, parents = tree
        self._remaining = remaining
        self._jump_ahead = jump_ahead
        count = len(self._tokens)
        self._children: list[list[int]] = [[] for _ in range(count)]
        for node in range(1, count):
            self._children[parents[node]].append(node)
        self.keep = np.zeros(count, np.bool_)
        self.masks = NodeMasks(np.zeros((count, state.row.shape[0]), np.int32), np.zeros(count, np.bool_))

    def run(self) -> None:
        """Fill `keep` and `masks`. Raises what the matcher raises; the request then has a new one."""
        self.keep[0] = True
        self.masks.bits[0], self.masks.free[0] = self._state.row, self._state.free
        try:
            self._below(0, self._remaining)
        except BaseException:
            self._state.matcher = new_matcher(self._req, self._state)
            raise

    def _below(self, node: int, remaining: int) -> None:
        """Visit what comes after a node, with `remaining` tokens that the output may have there."""
        matcher = self._state.matcher
        for child in self._children[node]:
            token = self._tokens[child]
            if remaining < 2 or self._ends(token) or not matcher.accept(token):
                continue
            if self._goes_on(child, remaining - 1):
                self.keep[child] = True
                self._below(child, remaining - 1)
            matcher.rollback(1)

    def _goes_on(self, node: int, remaining: int) -> bool:
        """Return whether the model is asked after a node that the matcher has accepted, and what may come there."""
        matcher, masks = self._state.matcher, self.masks
        if matcher.terminated:
            return False
        free = not matcher.fill(masks.bits, node)
        masks.free[node] = allow_ends(self._req, self._state.ends, masks.bits[node], free=free)
        if masks.free[node] or not self._jump_ahead:
            return True
        return len(matcher.forced()[:remaining]) < self._jump_ahead

    def _ends(self, token: int) -> bool:
        return token in self._req.eos_ids or token in self._req.sampling.stop_token_ids
