"""Follow: requests go on in their grammars, token by token, and by the tokens that a grammar forces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.pipeline.finish import LENGTH, Finisher, first_reason
from pegboard.core.pipeline.grammar.state import advance, forced, look_ahead, state_of
from pegboard.core.pipeline.grammar.work import GrammarWork
from pegboard.core.pipeline.running import SINGLE

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.status import FinishReason
    from pegboard.core.pipeline.grammar.state import GrammarState


class GrammarFollower:
    """What the requests with grammars share. The scheduler reads `sitting_out` after each step."""

    def __init__(self, work: GrammarWork | None = None, jump_ahead: int = 0, *, rolls_back: bool = False) -> None:
        self.work = work or GrammarWork()
        """Of the requests' matchers."""
        self.sitting_out: list[tuple[Req, int]] = []
        """Requests whose matchers have no time left in this step, with the token to go on by; the reader empties it."""
        self.forced_tokens = 0
        """Tokens that requests have gained beyond the sampled ones, since the start."""
        self.jump_ahead = jump_ahead
        """The fewest forced tokens that are taken without asking the model; 0: none ever."""
        self.rolls_back = rolls_back
        """Whether matchers can take tokens back, and so look at drafts."""

    def finisher(self, stops: Sequence[Finisher]) -> Finisher:
        """Make the finisher of one request with a grammar. `stops` are those that end it by a token or a text, for the
        tokens that the grammar forces.
        """
        return _FollowGrammar(self, (*stops, _BY_GRAMMAR))

    def sits_out(self, req: Req) -> bool:
        """Return whether the request's matcher has had no time for its newest token."""
        return bool(self.sitting_out) and self.sitting_out[-1][0] is req

    def runs_ahead(self, req: Req) -> bool:
        """Return whether forced tokens may be taken: nothing is wanted that only the model can say of each token."""
        return bool(self.jump_ahead) and req.logprobs is None and not req.flags & SINGLE

    def forced(self, req: Req, state: GrammarState) -> Sequence[int]:
        """Return the tokens to take without asking the model, as far as the request's length allows."""
        if not self.runs_ahead(req):
            return ()
        tokens = forced(req, state)[: req.remaining_tokens]
        return tokens if len(tokens) >= self.jump_ahead else ()


class _ByGrammar:
    """The grammar is complete, or its backend failed; and `max_new_tokens`, which a complete output does not reach."""

    def after(self, req: Req, token: int) -> FinishReason | None:
        state = state_of(req)
        reason = None if state is None else advance(req, state, token)
        return LENGTH.after(req, token) if reason is None else reason


_BY_GRAMMAR = _ByGrammar()


@dataclass(frozen=True, slots=True)
class _FollowGrammar:
    """Ends a request by its grammar or its length; the last of its finishers."""

    follower: GrammarFollower
    finishers: Sequence[Finisher]
    """All of the request's, for tokens that are forced."""

    def after(self, req: Req, token: int) -> FinishReason | None:
        follower, state = self.follower, state_of(req)
        if state is None:
            return LENGTH.after(req, token)
        if not follower.work.has_room(req):
            follower.sitting_out.append((req, token))
            return None
        since, before = follower.work.now(), req.output_len
        reason = _BY_GRAMMAR.after(req, token)
        if state.more and reason is None:
            return follower.work.took(req, since, 1)
        if reason is None:
            reason = look_ahead(req, state)
        if reason is None:
            reason = self._run_ahead(req, state)
        gained = req.output_len - before
        if gained and reason is None:
            reason = look_ahead(req, state)
        if reason is None:
            reason = follower.work.took(req, since, 1 + gained)
        return reason

    def _run_ahead(self, req: Req, state: GrammarState) -> FinishReason | None:
        """Take the tokens that the grammar forces; return why the request ends among them, if it does."""
        for token in self.follower.forced(req, state):
            req.tokens.append(token)
            self.follower.forced_tokens += 1
            reason = first_reason(self.finishers, req, token)
            if reason is not None:
                return reason
        return None
