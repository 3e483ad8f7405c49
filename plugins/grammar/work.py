"""GrammarWork: how much computing time matchers take, of a step and of a request, and where the slow ones are run.

Between two steps matchers have so many seconds together. A request whose matcher would take more than is left sits out:
it is in no batch until a thread beside the loop has found out what may come next in its output. So an expensive grammar
slows down itself. What a matcher takes is what it took last; the first time it is the most that its grammar has ever
taken, and with a new grammar, of which nothing is known, the request sits out. One that takes long in the loop all the
same, against its habit, is paid back: its owner's requests sit out for many times as long.

What is measured is the computing time of a thread, which does not depend on other processes. But the loop also waits
for the interpreter, which the thread beside it has meanwhile, and the others wait with it: the clock bounds that.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.grammar.failures import failure_of
from pegboard.plugins.grammar.state import advance, look_ahead
from pegboard.toolkit.system.blame import in_words

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req
    from pegboard.core.interfaces.status import FinishReason
    from pegboard.plugins.grammar.state import GrammarState

PAY_BACK = 20.0
"""A matcher that took longer in the loop than a step has makes its owner's requests sit out for so many times as long:
one owner's surprises stop the others for a twentieth of the time at most.
"""
WAIT_SHARE = 3.0
"""By the clock, the matchers of a step may take so many times the computing time that they have."""


@dataclass(frozen=True, slots=True)
class WorkLimits:
    """Seconds of computing time: of all matchers between two steps, and of an account, so many and more per token."""

    step_seconds: float = 0.01
    seconds: float = 2.0
    token_seconds: float = 0.01


@dataclass(slots=True, eq=False)
class Turn:
    """A request that sits out, with the token that its matcher has to go on by; once `done`, why it ends, if so."""

    req: Req
    state: GrammarState
    token: int
    reason: FinishReason | None = None
    done: bool = False


class GrammarWork:
    """Keeps account of matchers' work, and does what is too much for a step in a thread of its own.

    Everything but that thread's part is called by the loop. The matcher of a request that sits out is the thread's.
    """

    def __init__(self, limits: WorkLimits | None = None) -> None:
        self._limits = limits or WorkLimits()
        self._left = self._limits.step_seconds
        self._wait_left = self._limits.step_seconds * WAIT_SHARE
        self._debts: dict[str, float] = {}
        """Until when the requests of these owners sit out."""
        self._changed = threading.Condition()
        self._waiting: list[Turn] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin_step(self) -> None:
        """Give the matchers of the next step all of its time."""
        self._left = self._limits.step_seconds
        self._wait_left = self._left * WAIT_SHARE

    def has_room(self, req: Req, state: GrammarState, tokens: int = 1) -> bool:
        """Return whether the request's matcher may go on by so many tokens now, by what it is known to take. Otherwise
        it sits out.
        """
        cost = state.grammar.worst if state.cost is None else state.cost
        if cost is None or cost * tokens >= self._left or self._wait_left <= 0:
            return False
        return not (self._debts and self._in_debt(req.principal))

    def now(self) -> tuple[float, float]:
        """Return the computing time of this thread, and the clock."""
        return time.thread_time(), time.monotonic()

    def spent(self, state: GrammarState, since: tuple[float, float]) -> None:
        """Charge a matcher for looking at drafts since it was `since`. The next call of `took` says whether
        it was too much.
        """
        computing, clock = self.now()
        self._left -= computing - since[0]
        self._wait_left -= clock - since[1]
        with self._changed:
            state.seconds += computing - since[0]
            state.account.seconds += computing - since[0]

    def took(self, req: Req, state: GrammarState, since: tuple[float, float], tokens: int) -> FinishReason | None:
        """Charge the request's matcher, which has gone on by `tokens` since it was `since` (see `now`); why the request
        ends, if that was too much.
        """
        computing, clock = self.now()
        seconds = computing - since[0]
        self._left -= seconds
        self._wait_left -= clock - since[1]
        over = seconds - self._limits.step_seconds
        if over > 0:
            self._debts[req.principal] = max(self._debts.get(req.principal, 0.0), clock) + PAY_BACK * over
        return self._charge(req, state, seconds, tokens)

    def sit_out(self, req: Req, state: GrammarState, token: int) -> Turn:
        """Go on by the token in the thread, and find out what may come next."""
        turn = Turn(req, state, token)
        with self._changed:
            self._waiting.append(turn)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="matchers", daemon=True)
                self._thread.start()
            self._changed.notify()
        return turn

    def close(self) -> None:
        """Wait for the work under way, and do no more."""
        with self._changed:
            self._closed = True
            self._waiting = []
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _in_debt(self, owner: str) -> bool:
        now = time.monotonic()
        self._debts = {one: until for one, until in self._debts.items() if until > now}
        return owner in self._debts

    def _charge(self, req: Req, state: GrammarState, seconds: float, tokens: int) -> FinishReason | None:
        account, grammar = state.account, state.grammar
        with self._changed:
            state.cost = seconds
            grammar.worst = max(seconds, grammar.worst or 0.0)
            state.seconds += seconds
            state.tokens += tokens
            account.seconds += seconds
            account.tokens += tokens
        limits = self._limits
        if account.seconds <= limits.seconds + account.tokens * limits.token_seconds:
            return None
        # Together they have had too much. A request with no more than its fair share is not to blame for it.
        if state.seconds <= limits.seconds / max(1, account.requests) + state.tokens * limits.token_seconds:
            return None
        text = (
            f"finding out which tokens may come next has taken {state.seconds:.1f} s of computing time for "
            f"{state.tokens} tokens (with the other answers that have this grammar, {account.seconds:.1f} s); "
            "make it simpler"
        )
        return failure_of(req, InvalidRequest(text, code="grammar_too_complex"))

    # ---- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            since = time.thread_time()
            try:
                turn.reason = _go_on(turn)
                charged = self._charge(turn.req, turn.state, time.thread_time() - since, 1)
                turn.reason = turn.reason or charged
            except BaseException as error:
                # This thread must not end, whatever a library does: all who sit out wait for it.
                turn.reason = failure_of(turn.req, RuntimeError(in_words(error)))
            turn.done = True

    def _next(self) -> Turn | None:
        """Return next the request whose account has taken least: cheap ones do not wait for expensive ones."""
        with self._changed:
            while not self._closed:
                self._waiting = [turn for turn in self._waiting if not turn.req.finished]
                if self._waiting:
                    turn = min(self._waiting, key=lambda one: one.state.account.seconds)
                    self._waiting.remove(turn)
                    return turn
                self._changed.wait()
            return None


def _go_on(turn: Turn) -> FinishReason | None:
    reason = advance(turn.req, turn.state, turn.token)
    if reason is not None or not turn.req.remaining_tokens:
        return reason
    return look_ahead(turn.req, turn.state)
