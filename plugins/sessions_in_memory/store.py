"""InMemorySessions: trees of turns in the API process, whose tokens later turns continue.

A finished turn is a node: its prompt and its answer, in token ids. It keeps only what it added; the tokens before are
those of the turn that it continued. KV is not kept here: the next turn's prompt begins with the last one's, so the
prefix cache has most of it.
"""

from __future__ import annotations

import uuid
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pegboard.core.interfaces.client import AnnotatedPrompt, OutputStream
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.sessions_in_memory.api import SessionParams, SessionStore, SessionStoreContext
from pegboard.plugins.sessions_in_memory.options import SessionStoreOptions

if TYPE_CHECKING:
    from pegboard.core.interfaces.client import EngineClient, GenerateRequest, OutputChunk
    from pegboard.core.interfaces.clock import Clock
    from pegboard.core.interfaces.tokenizer import Tokenizer

MAX_ID_LENGTH = 256
MAX_TURNS = 4096
"""Most finished turns of one session; a tree of more than these serves no one."""


@dataclass(eq=False, slots=True)
class _Turn:
    """A finished turn. Its history is the first `kept` tokens of its parent's, and after them `own`, of which the last
    `output_len` are its answer.
    """

    rid: str
    parent: _Turn | None
    kept: int
    own: array[int]
    output_len: int
    children: list[_Turn] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.kept + len(self.own)

    def prefix(self, length: int) -> list[int]:
        """Return the first `length` tokens of its history."""
        parts: list[array[int]] = []
        turn: _Turn | None = self
        while turn is not None and length > 0:
            parts.append(turn.own[: max(0, length - turn.kept)])
            length = min(length, turn.kept)
            turn = turn.parent
        return [token for part in reversed(parts) for token in part]

    def below(self) -> Iterator[_Turn]:
        """Yield all turns that continue it, directly or not."""
        found = list(self.children)
        while found:
            turn = found.pop()
            yield turn
            found += turn.children

    def follows(self, other: _Turn | None) -> bool:
        """Return whether it is `other`, or continues it, directly or not. None is what everything begins with."""
        turn: _Turn | None = self
        while turn is not None and turn is not other:
            turn = turn.parent
        return turn is other


@dataclass(eq=False, slots=True)
class _Running:
    """A turn that has not ended. It continues the first `kept` tokens of its parent, or nothing. With `replace` its end
    removes all turns below its parent.
    """

    rid: str
    parent: _Turn | None
    kept: int
    replace: bool

    def excludes(self, other: _Running) -> bool:
        """Return whether the end of one of the two would remove what the other one continues, or its place."""
        return (self.replace and _follows(other.parent, self.parent)) or (
            other.replace and _follows(self.parent, other.parent)
        )


def _follows(turn: _Turn | None, other: _Turn | None) -> bool:
    return turn is other if turn is None else turn.follows(other)


class _Session:
    """One session: its finished turns by id, and those that are running."""

    def __init__(self, session_id: str, capacity: int, timeout: float, now: float, principal: str) -> None:
        self.id = session_id
        self.principal = principal
        self.capacity = capacity
        self.timeout = timeout
        self.used_at = now
        self.tokens = 0
        """What all its turns added together."""
        self._turns: dict[str, _Turn] = {}
        self._roots: list[_Turn] = []
        self._last: _Turn | None = None
        self._running: dict[str, _Running] = {}

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def begin(self, params: SessionParams, rid: str) -> _Running:
        """Note a turn that continues what `params` say. Raises InvalidRequest where it may not run now, or never."""
        if rid in self._turns or rid in self._running:
            raise InvalidRequest(
                f"the session {self.id!r} has a turn {rid[:MAX_ID_LENGTH]!r} already", param="rid", code="duplicate_rid"
            )
        replace = bool(params.replace)
        node = self._continued(params.rid or "")
        parent = None if replace and not params.rid else node
        turn = _Running(rid, parent, self._kept(parent, params), replace)
        for one in self._running.values():
            if turn.excludes(one):
                raise self._busy(f"its turn {one.rid!r} is running, and one of the two would replace the other")
        if len(self._turns) + len(self._running) - self._replaced(turn)[0] >= MAX_TURNS:
            raise self._full(f"{MAX_TURNS} turns")
        self._running[rid] = turn
        return turn

    def check_room(self, turn: _Running, new: int) -> None:
        """Raise InvalidRequest where so many new tokens are too many."""
        if self.tokens - self._replaced(turn)[1] + new > self.capacity:
            raise self._full(f"{self.capacity} tokens")

    def commit(self, turn: _Running, own: array[int], output_len: int, now: float) -> None:
        """Keep a turn that has ended well: it is history from now on."""
        if self._running.pop(turn.rid, None) is not turn:
            return
        self.used_at = now
        siblings = self._roots if turn.parent is None else turn.parent.children
        if turn.replace:
            for sibling in siblings:
                for old in (sibling, *sibling.below()):
                    del self._turns[old.rid]
                    self.tokens -= len(old.own)
            siblings.clear()
        node = _Turn(turn.rid, turn.parent, turn.kept, own, output_len)
        siblings.append(node)
        self._turns[node.rid] = node
        self._last = node
        self.tokens += len(own)

    def drop(self, turn: _Running, now: float) -> None:
        """Drop a turn that has ended in another way. May be called again, and after `commit`."""
        if self._running.get(turn.rid) is turn:
            del self._running[turn.rid]
            self.used_at = now

    def _continued(self, rid: str) -> _Turn | None:
        """Return the turn of this id; for "" the last one, where there is any."""
        if not rid:
            if self._running:
                raise self._busy("a turn of it is running; wait for its end, or name a finished turn in rid to branch")
            return self._last
        if rid in self._running:
            raise self._busy(f"its turn {rid!r} is still running", param="session_params.rid")
        if rid not in self._turns:
            raise InvalidRequest(
                f"the session {self.id!r} has no finished turn {rid[:MAX_ID_LENGTH]!r}",
                param="session_params.rid",
                code="turn_not_found",
                status=404,
            )
        return self._turns[rid]

    def _kept(self, parent: _Turn | None, params: SessionParams) -> int:
        """Return how many tokens of the history of `parent` stay."""
        length = 0
        if parent is not None:
            length = parent.length - (parent.output_len if params.drop_previous_output else 0)
        offset = params.offset or 0
        if not -length <= offset <= length:
            raise InvalidRequest(
                f"offset must be from {-length} to {length}, the length of the history, got {offset}",
                param="session_params.offset",
            )
        return offset if offset > 0 else length + offset

    def _replaced(self, turn: _Running) -> tuple[int, int]:
        """Return how many turns and tokens go when a turn has ended."""
        if not turn.replace:
            return 0, 0
        old = list(self._turns.values() if turn.parent is None else turn.parent.below())
        return len(old), sum(len(turn.own) for turn in old)

    def _busy(self, why: str, param: str = "session_params.id") -> InvalidRequest:
        return InvalidRequest(f"the session {self.id!r} is busy: {why}", param=param, code="session_busy", status=409)

    def _full(self, what: str) -> InvalidRequest:
        return InvalidRequest(
            f"the session {self.id!r} is full: it holds {what} at most; replace turns, or open another",
            param="session_params.id",
            code="session_full",
        )


class InMemorySessions(SessionStore[SessionStoreOptions]):
    """Sessions without a file or a database. See SessionStore for what turns are and when they become history.

    Turns that name the finished turn that they continue run side by side, as branches. One that does not is about the
    session's last turn, so it is refused while any other is running; as is one that names a running turn, and one whose
    end would remove what a running turn continues, or the other way round. Nothing is queued: which answer a turn
    continues would then depend on which comes first.

    The options bound sessions in number, in tokens each, and in time without a turn. A turn is refused when
    its prompt would exceed the tokens; an answer may exceed them, by its own length. Time is checked whenever a session
    is opened or used.
    """

    def __init__(self, options: SessionStoreOptions, ctx: SessionStoreContext) -> None:
        super().__init__(options, ctx)
        self._settings = options
        self._clock = ctx.clock
        self._sessions: dict[str, _Session] = {}

    def open(
        self, session_id: str = "", *, capacity: int = 0, timeout: float | None = None, principal: str = ""
    ) -> str:
        if len(session_id) > MAX_ID_LENGTH:
            raise InvalidRequest(
                f"session_id may have at most {MAX_ID_LENGTH} characters, got {len(session_id)}", param="session_id"
            )
        if capacity < 0:
            raise InvalidRequest(f"capacity_of_str_len must be at least 0, got {capacity}", param="capacity_of_str_len")
        if timeout is not None and not timeout > 0:
            raise InvalidRequest(f"timeout must be above 0, got {timeout}", param="timeout")
        self._expire()
        if session_id in self._sessions:
            raise InvalidRequest(
                f"the session {session_id!r} is open already", param="session_id", code="session_exists", status=409
            )
        settings = self._settings
        if len(self._sessions) >= settings.max_sessions and not self._make_room(principal):
            raise InvalidRequest(
                f"{settings.max_sessions} sessions are open, as many as this server keeps; close one",
                code="too_many_sessions",
                status=429,
            )
        name = session_id or uuid.uuid4().hex
        limit = min(capacity, settings.max_session_tokens) if capacity else settings.max_session_tokens
        seconds = settings.idle_timeout if timeout is None else min(timeout, settings.idle_timeout)
        self._sessions[name] = _Session(name, limit, seconds, self._clock(), principal)
        return name

    def close(self, session_id: str) -> None:
        self._find(session_id, "session_id")
        del self._sessions[session_id]

    async def submit(
        self, client: EngineClient, params: SessionParams | None, requests: Sequence[GenerateRequest]
    ) -> list[OutputStream]:
        if params is None or not params.id:
            if params is not None and params.model_dump(exclude_defaults=True, exclude={"id"}):
                raise InvalidRequest("session_params.id is needed", param="session_params.id")
            return await client.submit_all(requests)
        if len(requests) != 1:
            raise InvalidRequest(
                f"a turn of a session is one prompt with one answer, not {len(requests)} requests",
                param="session_params",
            )
        [request] = requests
        session = self._find(params.id, "session_params.id")
        turn = session.begin(params, request.rid or uuid.uuid4().hex)
        try:
            new = await self._new_tokens(client, request, turn)
            session.check_room(turn, len(new))
            prompt = [] if turn.parent is None else turn.parent.prefix(turn.kept)
            whole = msgspec.structs.replace(request, prompt=prompt + new, rid=turn.rid, add_special_tokens=False)
            [stream] = await client.submit_all([whole])
        except BaseException:
            session.drop(turn, self._clock())
            raise
        return [_TurnStream(stream, session, turn, new, self._clock)]

    def stats(self) -> dict[str, Any]:
        self._expire()
        return {
            "open": len(self._sessions),
            "busy": sum(one.busy for one in self._sessions.values()),
            "tokens": sum(one.tokens for one in self._sessions.values()),
        }

    async def _new_tokens(self, client: EngineClient, request: GenerateRequest, turn: _Running) -> list[int]:
        """Return what a request appends. The token that begins every prompt stays out of the middle."""
        prompt, tokenizer = request.prompt, client.tokenizer
        if isinstance(prompt, AnnotatedPrompt):
            text = "a session keeps tokens, and no pictures or videos: send the whole conversation without one"
            raise InvalidRequest(text, param="session_params", code="unsupported")
        if isinstance(prompt, str):
            special = request.add_special_tokens and not turn.kept
            [ids] = await client.tokenize([prompt], add_special_tokens=special)
        else:
            ids = list(prompt)
        return ids[1:] if turn.kept and ids and ids[0] == _bos_id(tokenizer) else ids

    def _find(self, session_id: str, param: str) -> _Session:
        self._expire()
        session = self._sessions.get(session_id)
        if session is None:
            raise InvalidRequest(
                f"there is no session {session_id[:MAX_ID_LENGTH]!r}: it was not opened, or is closed, or was idle for "
                "too long, or gave way to another key's",
                param=param,
                code="session_not_found",
                status=404,
            )
        return session

    def _make_room(self, principal: str) -> bool:
        """Close a session of a key that has more of them than `principal` would have with one more. Return whether
        there was one.
        """
        held = Counter(session.principal for session in self._sessions.values())
        more = [
            session
            for session in self._sessions.values()
            if not session.busy and held[session.principal] > held[principal] + 1
        ]
        if not more:
            return False
        oldest = max(more, key=lambda session: (held[session.principal], -session.used_at))
        del self._sessions[oldest.id]
        return True

    def _expire(self) -> None:
        now = self._clock()
        for one in [one for one in self._sessions.values() if not one.busy and now - one.used_at > one.timeout]:
            del self._sessions[one.id]


class _TurnStream(OutputStream):
    """The outputs of a turn, which is history as soon as the last of them is read."""

    def __init__(
        self, stream: OutputStream, session: _Session, turn: _Running, new: Sequence[int], clock: Clock
    ) -> None:
        self.rid = stream.rid
        self._stream = stream
        self._session = session
        self._turn = turn
        self._own = array("i", new)
        self._new_len = len(new)
        self._clock = clock

    def __aiter__(self) -> AsyncIterator[OutputChunk]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[OutputChunk]:
        try:
            async for chunk in self._stream:
                self._own.extend(chunk.token_ids)
                if chunk.finish_reason is not None:
                    self._end(well=chunk.finish_reason.get("type") != "abort")
                yield chunk
        finally:
            self._end(well=False)

    async def aclose(self) -> None:
        self._end(well=False)
        await self._stream.aclose()

    def _end(self, *, well: bool) -> None:
        now = self._clock()
        if well:
            self._session.commit(self._turn, self._own, len(self._own) - self._new_len, now)
        else:
            self._session.drop(self._turn, now)


def _bos_id(tokenizer: Tokenizer) -> int | None:
    """Return the token that begins a prompt, where the model has one."""
    text = tokenizer.named_tokens.get("bos_token")
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    return ids[0] if len(ids) == 1 else None
