"""Finish: the reasons for which a request ends, each asked after every token that it gets.

A request has a list of finishers, in the order in which they are asked; the first that gives a reason ends it. Its
parameters decide which ones. Most requests have two: one for tokens that end an output, and one for its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.core.pipeline.text.detokenize import IncrementalDetokenizer, TokenDecoder
from pegboard.core.pipeline.text.stop import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.stops import CompiledStops


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
