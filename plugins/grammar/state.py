"""Grammars: where each request is in its own, and the masks of the tokens that may come next."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pegboard.core.interfaces.status import FinishReason, FinishType
from pegboard.plugins.grammar.api import CompiledGrammar
from pegboard.plugins.grammar.failures import failure_of, let_through
from pegboard.toolkit.system.log_lines import quoted

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pegboard.core.interfaces.req import Req
    from pegboard.plugins.grammar.api import GrammarMatcher

logger = logging.getLogger(__name__)


@dataclass(slots=True, weakref_slot=True)
class Account:
    """Computing time of the matchers of one owner's requests with one grammar, for as long as there are any, and the
    tokens that they went on by. Several answers to one prompt share it, and without keys so do strangers: `requests`
    are those that are here now.
    """

    seconds: float = 0.0
    tokens: int = 0
    requests: int = 0


class Prepared(CompiledGrammar):
    """A compiled grammar with what is the same for all its outputs: `row` and `free` are how they may begin, as in
    GrammarState. `worst` is the most computing time, in seconds, that going on by a token has taken so far; None where
    no output has.
    """

    def __init__(self, compiled: CompiledGrammar, row: NDArray[np.int32], *, free: bool) -> None:
        self._compiled = compiled
        self.row = row
        self.free = free
        self.worst: float | None = None

    @property
    def size_bytes(self) -> int:
        return self._compiled.size_bytes + self.row.nbytes

    def matcher(self) -> GrammarMatcher:
        return self._compiled.matcher()


@dataclass(slots=True)
class GrammarState:
    """One request's position in its grammar. `row` int32 [words] has a bit for each token that may come next; with
    `free` any may. `ends` are the bits of the tokens that end an output. `cost` is the computing time, in seconds, that
    its matcher took last, None before it has gone on by a token; `seconds` and `tokens` are its part of the account.
    """

    matcher: GrammarMatcher
    row: NDArray[np.int32]
    ends: NDArray[np.int32]
    account: Account
    grammar: Prepared
    free: bool = False
    cost: float | None = None
    seconds: float = 0.0
    tokens: int = 0


def advance(req: Req, state: GrammarState, token: int) -> FinishReason | None:
    """Go on by a token that has been sampled. Why the request ends, if it does: the output is complete, whatever
    `ignore_eos` and `min_new_tokens` say, or the backend's code failed.
    """
    try:
        if not state.matcher.accept(token):
            raise RuntimeError(f"the token {token} was sampled, which the grammar does not allow here")
        return FinishReason(FinishType.STOP) if state.matcher.terminated else None
    except BaseException as error:
        return failure_of(req, error)


def look_ahead(req: Req, state: GrammarState) -> FinishReason | None:
    """Find out which tokens may come next; why the request ends, if none may or the backend's code fails."""
    try:
        free = not state.matcher.fill(state.row[None], 0)
        state.free = allow_ends(req, state.ends, state.row, free=free)
    except BaseException as error:
        return failure_of(req, error)
    return None


def forced(req: Req, state: GrammarState) -> list[int]:
    """Return tokens that must come next. A backend that fails here only costs the short cut."""
    if state.free:
        return []
    try:
        return [int(token) for token in state.matcher.forced()]
    except BaseException as error:
        let_through(error)
        logger.error("the grammar of %s failed to say what it forces", quoted(req.name), exc_info=error)
        return []


def new_matcher(req: Req, state: GrammarState) -> GrammarMatcher:
    """Return a matcher that has gone on by all of the request's output. Raises what the backend's code raises."""
    matcher = state.grammar.matcher()
    for token in req.output_ids.tolist():
        if not matcher.accept(token):
            raise RuntimeError(f"the grammar does not allow the token {token}, which it has allowed before")
    return matcher


def allow_ends(req: Req, ends: NDArray[np.int32], row: NDArray[np.int32], *, free: bool) -> bool:
    """Put into `row` what the request says about tokens that end it, `ends` being those of the model. Return whether
    any token may come, `free` before that. Raises where nothing is allowed.
    """
    params = req.sampling
    if free:
        if not params.ignore_eos:
            return True
        row[:] = -1
    if params.ignore_eos and (row & ~ends).any():
        row &= ~ends
    elif params.stop_token_ids and (row & ends).any():
        # Whatever ends an output may come where the grammar lets it end.
        row |= bits_of(params.stop_token_ids, row.shape[0])
    if not row.any():
        raise RuntimeError("the grammar allows none of the model's tokens here")
    return False


def bits_of(tokens: Iterable[int], words: int) -> NDArray[np.int32]:
    """Return int32 [words] with the bits of these tokens."""
    row = np.zeros(words, np.uint32)
    for token in tokens:
        if 0 <= token < words * 32:
            row[token // 32] |= np.uint32(1 << token % 32)
    return row.view(np.int32)
