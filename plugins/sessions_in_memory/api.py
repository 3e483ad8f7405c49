"""Contract: sessions, conversations whose tokens the server remembers, so that a request brings only what is new."""

from __future__ import annotations

import abc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from pydantic import BaseModel, ConfigDict

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.interfaces.options import NoOptions, OptionsT
from pegboard.toolkit.media.inputs import MediaPrompt

if TYPE_CHECKING:
    from pegboard.core.interfaces.api_router import ApiContext
    from pegboard.core.interfaces.client import EngineClient, GenerateRequest, OutputStream
    from pegboard.core.interfaces.clock import Clock


class SessionParams(BaseModel):
    """`session_params` of a request: which turn of which session it continues. null is what is left out.

    A field of a body, as it stands: ``session_params: SessionParams | None = None``.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, use_attribute_docstrings=True)

    id: str | None = None
    """The session. Without one the request is not a turn of any."""
    rid: str | None = None
    """The turn to continue, by the id of its request; empty: the one that ended last."""
    offset: int | None = None
    """Where to cut the history before the new prompt is appended: so many tokens stay, or, where it is negative, all
    but so many. 0: nothing is cut."""
    replace: bool | None = None
    """Whether the new turn takes the place of all that followed on `rid` before, when it has ended; without `rid`, of
    the whole session, which begins anew with it. Otherwise it is a branch beside them."""
    drop_previous_output: bool | None = None
    """Whether to continue that turn's prompt, and leave its answer out of the history."""


@dataclass(frozen=True, slots=True)
class SessionStoreContext:
    """What a store is built from: the clock, in seconds, by which sessions grow old."""

    clock: Clock = time.monotonic


class SessionStore(abc.ABC, Generic[OptionsT]):
    """The sessions of a server. Lives in the API process, whose event loop alone uses it.

    For an API plugin a turn of a session is a request like any other. Its record says
    ``requires=("sessions_in_memory",)``, and `turn` takes the place of `EngineClient.submit_all`, with or without a
    session::

        answers = await Answers.submit(self.client, requests, turn(self.ctx, body.session_params))
    """

    def __init__(self, options: OptionsT, ctx: SessionStoreContext) -> None:
        self.options = options
        self.ctx = ctx

    @classmethod
    def supports(cls, options: OptionsT, ctx: SessionStoreContext) -> str | None:
        """Return None, or the reason why it cannot serve here."""
        return None

    @abc.abstractmethod
    def open(
        self, session_id: str = "", *, capacity: int = 0, timeout: float | None = None, principal: str = ""
    ) -> str:
        """Begin a session; its id, a new one where none is given.

        `capacity` is the most tokens that it keeps, `timeout` the seconds without a turn after which it is closed; 0
        and None are the server's own limits, which are never exceeded. `principal` says who asks: the name of the API
        key, "" without one. Where there are too many sessions, the one that was idle for longest, of the key that has
        most, is closed for a key that has fewer. Raises InvalidRequest: 400 for what is wrong, 409 where there is such
        a session, 429 where there are too many and none gives way.
        """

    @abc.abstractmethod
    def close(self, session_id: str) -> None:
        """Forget a session; a turn of it that is running goes on to its end. Raises InvalidRequest (404) where there is
        none.
        """

    @abc.abstractmethod
    async def submit(
        self, client: EngineClient, params: SessionParams | None, requests: Sequence[GenerateRequest]
    ) -> list[OutputStream]:
        """Submit requests; where `params` name a session, the one request as a turn of it.

        The turn's prompt is the history and after it the request's own, without the special tokens that begin a
        prompt unless there is no history. Its tokens and those of its answer become history once its last output has
        been read from the stream. One that fails, is aborted or whose stream is closed before leaves the session as it
        was, and so does one that is refused.

        Raises InvalidRequest: as `client.submit_all`; 400 for several requests, for pictures and videos, of which
        tokens say nothing, for an `offset` beyond the history, for an id that a turn has already, and where the session
        is full; 404 for a session or a turn that is not there;
        409 where the turn that it continues, or would replace, is still running.
        """

    @abc.abstractmethod
    def stats(self) -> dict[str, object]:
        """Return figures for `/server_info`."""


class NoSessions(SessionStore[NoOptions]):
    """The store of a server without sessions: there are none, and none can be opened."""

    def __init__(self) -> None:
        super().__init__(NoOptions(), SessionStoreContext())

    def open(
        self, session_id: str = "", *, capacity: int = 0, timeout: float | None = None, principal: str = ""
    ) -> str:
        raise self._error("session_id")

    def close(self, session_id: str) -> None:
        raise self._error("session_id")

    async def submit(
        self, client: EngineClient, params: SessionParams | None, requests: Sequence[GenerateRequest]
    ) -> list[OutputStream]:
        if params is not None and params.id:
            raise self._error("session_params")
        return await client.submit_all(requests)

    def stats(self) -> dict[str, object]:
        return {}

    def _error(self, param: str) -> InvalidRequest:
        return InvalidRequest("this server keeps no sessions", param=param, code="no_sessions")


def sessions_of(ctx: ApiContext) -> SessionStore:
    """Return the sessions of the server that an API is built for; NoSessions where it keeps none."""
    found = ctx.services.get("session_store")
    return found if isinstance(found, SessionStore) else NoSessions()


def turn(
    ctx: ApiContext, session: SessionParams | None
) -> Callable[[Sequence[GenerateRequest]], Awaitable[list[OutputStream]]]:
    """Return what submits requests; where `session` names one, the one request as a turn of it."""

    async def submit(requests: Sequence[GenerateRequest]) -> list[OutputStream]:
        if session is not None and session.id:
            _refuse_media(requests)
        return await sessions_of(ctx).submit(ctx.client, session, requests)

    return submit


def _refuse_media(requests: Sequence[GenerateRequest]) -> None:
    """Raise InvalidRequest for a turn of a session whose prompt is more than text or ids."""
    for one in requests:
        if isinstance(one.prompt, MediaPrompt):
            what = "no pictures and videos" if one.prompt.media else "no text that spells a token of them"
            message = f"session_params: sessions remember tokens, {what}; send the whole conversation without a session"
            raise InvalidRequest(message, param="session_params", code="unsupported")
