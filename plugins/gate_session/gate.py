"""Turns of a session, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pegboard.core.interfaces.admission_gate import OPEN, AdmissionGate, AdmissionGateContext, Verdict
from pegboard.plugins.gate_session.options import SessionGateOptions

if TYPE_CHECKING:
    from pegboard.core.interfaces.req import Req

MAX_ID_LENGTH = 256


class SessionGate(AdmissionGate[SessionGateOptions]):
    """A request says which session it is a turn of: ``params["session"] = {"id": "..."}``.

    A turn is blocked until all earlier turns of its session have ended, in whichever way; so each finds the KV of the
    ones before it in the cache, and two answers to one conversation never race. Sessions do not know of each other.
    """

    def __init__(self, options: SessionGateOptions, ctx: AdmissionGateContext) -> None:
        super().__init__(options, ctx)
        self._turns: dict[str, list[str]] = {}
        """Rids of each session's turns that have not ended, in the order in which they came."""
        self._session: dict[str, str] = {}
        """The session of each of those turns."""

    def concerns(self, req: Req) -> bool:
        return "session" in req.params

    def enter(self, req: Req) -> Verdict:
        said = req.params["session"]
        session = said.get("id") if isinstance(said, Mapping) else None
        if not isinstance(session, str) or not 0 < len(session) <= MAX_ID_LENGTH:
            text = f"session must be an object with an `id` of 1 to {MAX_ID_LENGTH} characters"
            return Verdict.failed(text, code="invalid_session", param="params.session")
        turns = self._turns.get(session, [])
        if len(turns) > self.options.max_waiting_turns:
            text = f"{len(turns) - 1} turns of the session {session!r} are waiting, try again when they have ended"
            return Verdict.failed(text, status=429, code="session_busy", param="params.session")
        self._turns.setdefault(session, turns).append(req.rid)
        self._session[req.rid] = session
        return self._verdict(turns.index(req.rid), session)

    def poll(self, blocked: Sequence[Req]) -> Mapping[str, Verdict]:
        news = {}
        for req in blocked:
            session = self._session[req.rid]
            news[req.rid] = self._verdict(self._turns[session].index(req.rid), session)
        return news

    def cancel(self, req: Req) -> None:
        self._ended(req)

    def finished(self, req: Req) -> bool:
        self._ended(req)
        return False

    def _verdict(self, before: int, session: str) -> Verdict:
        if not before:
            return OPEN
        return Verdict.blocked(f"{before} earlier turns of the session {session!r}")

    def _ended(self, req: Req) -> None:
        session = self._session.pop(req.rid, None)
        if session is None:
            return
        turns = self._turns[session]
        turns.remove(req.rid)
        if not turns:
            del self._turns[session]
