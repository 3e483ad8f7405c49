"""What binds the tokens of a request with a budget: none while it lasts, and then those that end its thought."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.constraint import LATER, Later, NodeMasks, TokenConstraint
from pegboard.core.interfaces.status import FinishReason
from pegboard.toolkit.parsing.thoughts import Watch
from pegboard.toolkit.text.detokenize import IncrementalDetokenizer, TokenDecoder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.thinking_budget.messages import Asked

Tree = tuple[Sequence[int], Sequence[int]]


class BudgetConstraint(TokenConstraint):
    """Counts the tokens of a request's thoughts. `words` is the length of a mask."""

    def __init__(self, req: Req, asked: Asked, tokenizer: TokenDecoder, words: int) -> None:
        self._req = req
        self._asked = asked
        self._words = words
        self._watch = Watch(asked, asked.text)
        self._text = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        self._count = 0
        self._since = 0
        """How many tokens of the output are of the thought that is under way."""
        self._closed = 0
        """How many thoughts were ended here."""
        self._left: list[int] = []
        """Tokens that must come next."""
        self._look()

    @property
    def over(self) -> bool:
        """Whether nothing is bound any more."""
        return self._watch.over and not self._left

    def room(self, n: int) -> bool:
        return True

    def mask(self) -> NDArray[np.int32] | None:
        if not self._left:
            return None
        row = np.zeros(self._words, np.uint32)
        row[self._left[0] // 32] = 1 << self._left[0] % 32
        return row.view(np.int32)

    def walk(self, tree: Tree, remaining: int) -> tuple[NDArray[np.bool_], NodeMasks]:
        """Keep what may be thought in any case, wherever in the tree a thought begins or ends."""
        depths = [0]
        for parent in tree[1][1:]:
            depths.append(depths[parent] + 1)
        most = len(depths) if self.over else 0 if self._left else max(0, self._asked.tokens - self._count - 1)
        keep = np.array(depths) <= min(most, remaining - 1)
        bits, free = np.zeros((int(keep.sum()), self._words), np.int32), np.ones(int(keep.sum()), np.bool_)
        if (mask := self.mask()) is not None:
            bits[0], free[0] = mask, False
        return keep, NodeMasks(bits, free)

    def advance(self, token: int, more: bool) -> Sequence[int]:
        if self.over:
            return ()
        thinking = self._watch.thinking
        self._watch.feed(self._text.push([token]))
        if self._left:
            self._follow(token)
        elif thinking and self._watch.thinking:
            self._count += 1
            self._since += 1
        if not self._watch.thinking:
            self._since = 0
        self._look()
        return () if more or self._req.single else self._left[: self._req.remaining_tokens]

    def _follow(self, token: int) -> None:
        """Go on in what ends the thought. Any other token may come where something else binds the request, too."""
        if token != self._left[0]:
            self._left = []
            return
        self._left = self._left[1:]
        if not self._left:
            self._closed += 1
            self._watch.close()

    def _look(self) -> None:
        if self._watch.thinking and not self._left and self._count >= self._asked.tokens:
            closes = self._asked.closes
            close = closes[min(self._closed, len(closes) - 1)]
            # The model may have begun to write it.
            most = min(self._since, len(close) - 1)
            written = self._req.output_ids[-most:].tolist() if most else []
            begun = (n for n in range(most, 0, -1) if written[-n:] == list(close[:n]))
            self._left = list(close[next(begun, 0) :])


class BesideAnother(TokenConstraint):
    """A budget beside the constraint that the request has anyway, such as a grammar. That one comes first: a thought
    goes on until it may end.
    """

    def __init__(self, budget: BudgetConstraint, other: TokenConstraint) -> None:
        self._budget, self._other = budget, other
        self._forced: Sequence[int] | None = None
        """While the other needs longer: what the budget has said."""

    def room(self, n: int) -> bool:
        return self._other.room(n)

    def mask(self) -> NDArray[np.int32] | None:
        own, others = self._budget.mask(), self._other.mask()
        if own is None or others is None:
            return others if own is None else own
        both = own & others
        return both if both.any() else others

    def walk(self, tree: Tree, remaining: int) -> tuple[NDArray[np.bool_], NodeMasks]:
        keep, _ = self._budget.walk(tree, remaining)
        others, masks = self._other.walk(tree, remaining)
        return keep & others, masks.keep(keep[others])

    def advance(self, token: int, more: bool) -> FinishReason | Sequence[int] | Later:
        if self._forced is None:
            self._forced = self._budget.advance(token, more)
        found = self._other.advance(token, more)
        if found is LATER:
            return LATER
        forced, self._forced = self._forced, None
        return found if isinstance(found, FinishReason) or found or not self._allows(token, forced) else forced

    def _allows(self, token: int, forced: Sequence[int]) -> bool:
        """Return whether all of `forced` may come after `token`, the newest one."""
        if not forced or not self._other.room(len(forced) + 1):
            return False
        tree = ([token, *forced], range(-1, len(forced)))
        return bool(self._other.walk(tree, len(forced) + 1)[0].all())
