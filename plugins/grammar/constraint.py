"""GrammarConstraint: a request goes on in its grammar, token by token, and by the tokens that the grammar forces."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np

from pegboard.core.interfaces.constraint import (
    LATER,
    Later,
    NodeMasks,
    TokenConstraint,
    constrain,
)
from pegboard.core.interfaces.req import ReqSlot
from pegboard.plugins.grammar.drafts import DraftWalk
from pegboard.plugins.grammar.failures import let_through
from pegboard.plugins.grammar.state import (
    Account,
    GrammarState,
    Prepared,
    advance,
    allow_ends,
    bits_of,
    forced,
    look_ahead,
)
from pegboard.plugins.grammar.work import GrammarWork, Turn
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.sampling import Grammar
    from pegboard.core.interfaces.status import FinishReason
    from pegboard.plugins.grammar.api import CompiledGrammar

logger = logging.getLogger(__name__)


class Grammars:
    """Puts requests at the beginning of their grammars, and has what they share. `vocab_size` is the width of the
    logits, `eos_ids` end an output. `jump_ahead` is the fewest forced tokens that are taken without asking the model,
    0: none ever. `rolls_back` says whether matchers can take tokens back, and so look at drafts.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_ids: frozenset[int],
        work: GrammarWork | None = None,
        jump_ahead: int = 0,
        *,
        rolls_back: bool = False,
    ) -> None:
        self.work = work or GrammarWork()
        """Of the requests' matchers."""
        self.jump_ahead = jump_ahead
        self.rolls_back = rolls_back
        self.waits = 0
        """Times that a request sat out steps, because its grammar takes long to follow."""
        self._words = -(-vocab_size // 32)
        self._ends = bits_of(eos_ids, self._words)
        self._accounts: WeakValueDictionary[tuple[str, Grammar | None], Account] = WeakValueDictionary()

    def prepare(self, compiled: CompiledGrammar) -> Prepared:
        """Find out how outputs may begin: the same for all of them, and done once. May be called in any thread."""
        row = np.zeros(self._words, np.int32)
        free = not compiled.matcher().fill(row[None], 0)
        return Prepared(compiled, row, free=free)

    def begin(self, req: Req, compiled: CompiledGrammar) -> None:
        """Give a request its matcher. Raises what the backend's code raises."""
        grammar = compiled if isinstance(compiled, Prepared) else self.prepare(compiled)
        account = self._accounts.setdefault((req.principal, req.sampling.grammar), Account())
        state = GrammarState(grammar.matcher(), grammar.row.copy(), self._ends, account, grammar, grammar.free)
        state.free = allow_ends(req, state.ends, state.row, free=state.free)
        account.requests += 1
        _STATE.of(req)[:] = [state]
        constrain(req, GrammarConstraint(req, state, self))

    def forget(self, req: Req) -> None:
        """Keep nothing of the request any more."""
        state = state_of(req)
        if state is not None:
            state.account.requests -= 1
            _STATE.clear(req)
            constrain(req, None)


_STATE: ReqSlot[list[GrammarState]] = ReqSlot(list)
"""Where a request is in its grammar; what binds it may be more than that."""


class GrammarConstraint(TokenConstraint):
    """What one request's grammar says, from the gate's opening until the request ends."""

    def __init__(self, req: Req, state: GrammarState, grammars: Grammars) -> None:
        self.state = state
        self._req = req
        self._grammars = grammars
        self._sees_drafts = grammars.rolls_back
        self._turn: Turn | None = None
        """While the matcher is with the thread of `GrammarWork`."""
        self._since: tuple[float, float] | None = None
        """When the matcher began with the tokens that it has not been charged for: a sampled one, and those that this
        one forces.
        """
        self._gained = 0
        """How many of these tokens it has gone on by."""

    def room(self, n: int) -> bool:
        return self._sees_drafts and self._grammars.work.has_room(self._req, self.state, n)

    def mask(self) -> NDArray[np.int32] | None:
        return None if self.state.free else self.state.row

    def walk(self, tree: tuple[Sequence[int], Sequence[int]], remaining: int) -> tuple[NDArray[np.bool_], NodeMasks]:
        work, req = self._grammars.work, self._req
        walk = DraftWalk(req, self.state, tree, remaining, 0 if req.single else self._grammars.jump_ahead)
        since = work.now()
        try:
            walk.run()
        except BaseException as error:  # a panic in Rust derives from it alone
            let_through(error)
            logger.exception("the grammar of %s cannot follow drafts: it gets none any more", quoted(req.name))
            walk.keep[1:] = self._sees_drafts = False
        work.spent(self.state, since)
        return walk.keep, walk.masks.keep(walk.keep)

    def advance(self, token: int, more: bool) -> FinishReason | Sequence[int] | Later:
        work, req, state = self._grammars.work, self._req, self.state
        if self._turn is not None:
            return self._caught_up(self._turn)
        sampled = self._since is None
        if self._since is None:
            if not work.has_room(req, state):
                self._grammars.waits += 1
                self._turn = work.sit_out(req, state, token)
                return LATER
            self._since, self._gained = work.now(), 0
        self._gained += 1
        reason = advance(req, state, token)
        if reason is not None or not req.remaining_tokens:
            return reason or ()
        if more:
            return self._charge(self._since) if sampled else ()
        if (reason := look_ahead(req, state)) is not None:
            return reason
        ahead = self._forced() if sampled else ()
        return ahead or self._charge(self._since)

    def _charge(self, since: tuple[float, float]) -> FinishReason | Sequence[int]:
        """Charge the request for what it has gone on by; why it ends, if that was too much."""
        self._since = None
        return self._grammars.work.took(self._req, self.state, since, self._gained) or ()

    def _caught_up(self, turn: Turn) -> FinishReason | Sequence[int] | Later:
        if not turn.done:
            return LATER
        self._turn = None
        return turn.reason or ()

    def _forced(self) -> Sequence[int]:
        """Return the tokens to take without asking the model, as far as the request's length allows."""
        least = self._grammars.jump_ahead
        if not least or self._req.single:
            return ()
        tokens = forced(self._req, self.state)[: self._req.remaining_tokens]
        return tokens if len(tokens) >= least else ()


def state_of(req: Req) -> GrammarState | None:
    """Return where a request is in its grammar; None for one that has none."""
    found = _STATE.peek(req)
    return found[0] if found else None
