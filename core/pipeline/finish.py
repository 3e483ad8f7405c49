"""Finish: the reasons for which a request ends, each asked after every token that it gets.

A request has a list of finishers, in the order in which they are asked; the first that gives a reason ends it. Its
parameters decide which ones. Most requests have two: one for tokens that end an output, and one for its length. Where a
request has a constraint, that is asked after the others, and its length last.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from pegboard.core.interfaces.constraint import LATER, Later, constraint_of
from pegboard.core.interfaces.req import ReqSlot
from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.flags import CONSTRAINED
from pegboard.toolkit.system.blame import in_words
from pegboard.toolkit.system.log_lines import quoted
from pegboard.toolkit.text.detokenize import IncrementalDetokenizer, TokenDecoder
from pegboard.toolkit.text.stop import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stops import CompiledStops
    from pegboard.core.pipeline.points import Points

logger = logging.getLogger(__name__)


class Finisher(Protocol):
    """One reason to end."""

    def after(self, req: Req, token: int) -> FinishReason | None:
        """Return why the request ends with `token`, the newest of its output; None where it goes on."""


def first_reason(finishers: Iterable[Finisher], req: Req, token: int) -> FinishReason | None:
    """Ask them in order."""
    for one in finishers:
        reason = one.after(req, token)
        if reason is not None:
            return reason
    return None


class EndTokens:
    """The model's end of sequence, and the request's `stop_token_ids`. All requests share one."""

    def after(self, req: Req, token: int) -> FinishReason | None:
        params = req.sampling
        if (not params.ignore_eos and token in req.eos_ids) or token in params.stop_token_ids:
            return FinishReason(FinishType.STOP, matched=token)
        return None


@dataclass(slots=True)
class StopText:
    """Stop strings of one request, and what its stages bring, matched on its decoded tail."""

    detokenizer: IncrementalDetokenizer
    matcher: StopMatcher

    @classmethod
    def of(cls, req: Req, tokenizer: TokenDecoder, others: Sequence[CompiledStops] = ()) -> StopText:
        params = req.sampling
        detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        return cls(detokenizer, StopMatcher(params.stop, others))

    def after(self, req: Req, token: int) -> FinishReason | None:
        early = req.output_len < req.sampling.min_new_tokens
        _, matched = self.matcher.feed(self.detokenizer.push([token]), ignore=early)
        return None if matched is None else FinishReason(FinishType.STOP, matched=matched)


class Length:
    """`max_new_tokens`. All requests share one."""

    def after(self, req: Req, token: int) -> FinishReason | None:
        return None if req.remaining_tokens else FinishReason(FinishType.LENGTH)


END_TOKENS = EndTokens()
LENGTH = Length()


class Finishers:
    """Makes those of each request, in the order in which they are asked."""

    def __init__(self, tokenizer: TokenDecoder | None, points: Points) -> None:
        self._tokenizer = tokenizer
        self._points = points

    def of(self, req: Req) -> Sequence[Finisher]:
        """Return a request's own, which are made at its first token that needs a look."""
        if (found := _FINISHERS.peek(req)) is None:
            own: list[Finisher] = [END_TOKENS]
            if self._tokenizer is not None:
                own += self._points.stop_texts(req, partial(StopText.of, req, self._tokenizer))
            own += self._points.finishers(req)
            if not req.flags & CONSTRAINED:
                own.append(LENGTH)
            found = _FINISHERS.of(req)
            found += own
        return found


_FINISHERS: ReqSlot[list[Finisher]] = ReqSlot(list)


class Constraints:
    """Goes on in the constraints of requests by the tokens that they get."""

    def __init__(self, points: Points) -> None:
        self.later: list[Req] = []
        """Requests whose constraints need longer; the reader empties it."""
        self.forced_tokens = 0
        """Tokens that requests had to get, so that the model was not asked; the reader takes them."""
        self._points = points

    def advance(
        self, req: Req, token: int, finishers: Sequence[Finisher], *, more: bool = False
    ) -> FinishReason | None:
        """Go on by the newest token of a request, which its `finishers` have seen, and by the tokens that must come
        after it. Return why the request ends, if it does. It is in `later` where its constraint needs longer.
        """
        ahead: list[int] = []
        while True:
            found = self._advanced(req, token, more or bool(ahead))
            if found is LATER:
                self.later.append(req)
                return None
            if isinstance(found, FinishReason):
                return found
            if not req.remaining_tokens:
                return LENGTH.after(req, token)
            ahead += () if more else found
            if not ahead:
                return None
            token = ahead.pop(0)
            req.tokens.append(token)
            self.forced_tokens += 1
            if (reason := first_reason(finishers, req, token)) is not None:
                return reason

    def wait_for(self, req: Req) -> bool:
        """Return whether the constraint of a request that has just advanced needs longer."""
        return bool(self.later) and self.later[-1] is req

    def _advanced(self, req: Req, token: int, more: bool) -> FinishReason | Sequence[int] | Later:
        constraint = constraint_of(req)
        try:
            return () if constraint is None else constraint.advance(token, more)
        except Exception as error:
            culprits = self._points.culprits
            culprit = culprits.of(error)
            culprits.count(culprit)
            logger.error("the constraint of %s failed", quoted(req.name), exc_info=error)
            text = f"its constraint failed: {in_words(error)}" if culprit is None else culprit.tell(error)
            return FinishReason(FinishType.ABORT, message=text, status=500, code="plugin_failed")
