"""The sides that answer in ``pegboard chat``: an engine in this process, or a server with OpenAI's API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.core.interfaces.errors import InvalidRequest, PegboardError

if TYPE_CHECKING:
    from pegboard.core.engine.engine import Engine
    from pegboard.core.interfaces.client import OutputChunk
    from pegboard.core.interfaces.sampling import SamplingParams
    from pegboard.tools.chat.server_client import ServerClient

Message = dict[str, Any]
TOGETHER = 0.001
"""Seconds within which tokens come together: no model has computed them one after another in so short a time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of an answer, or of the thinking before it."""

    text: str
    reasoning: bool = False


@dataclass(slots=True)
class Figures:
    """What an answer took, so far. `exact` is False where tokens had to be guessed: a server counts them at the end,
    and an answer may be stopped before that.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""
    exact: bool = True
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    """Seconds to the first token."""
    seconds: float = 0.0
    _last: float = 0.0
    """Seconds to the last token."""
    _came: int = 0
    """Tokens, or pieces of text where tokens are not counted."""
    _came_first: int = 0
    """Those of them that came together, before the others."""

    def tick(self, tokens: int) -> None:
        """Something has come, so many tokens (or pieces) among it."""
        self.seconds = time.monotonic() - self.began
        if not tokens:
            return
        if self.first is None:
            self.first = self.seconds
        self._came += tokens
        self._last = self.seconds
        if self._last - self.first < TOGETHER:
            self._came_first = self._came

    @property
    def rate(self) -> float | None:
        """Tokens per second after those that came first. None where all came together: that says nothing of it."""
        if self.first is None or self._came_first == self._came:
            return None
        share = 1 - self._came_first / self._came
        return self.completion_tokens * share / (self._last - self.first)


class Speaker(Protocol):
    """Answers conversations."""

    name: str

    def answer(self, messages: Sequence[Message], settings: Mapping[str, Any], figures: Figures) -> Iterator[Piece]:
        """Return the answer as it comes, a generator; `figures` are kept up to date. `settings` have OpenAI's names.

        Raises PegboardError, and KeyboardInterrupt where the user has had enough, at a moment when that does no harm.
        Closing it aborts the answer.
        """

    def close(self) -> None:
        """Note that the user has left."""


class EngineSpeaker:
    """An engine in this process."""

    def __init__(self, engine: Engine) -> None:
        from pegboard.tools.chat.conversation import Interlocutor

        self._engine = engine
        self._interlocutor = Interlocutor(engine)
        self.name = engine.info.served_name

    def answer(self, messages: Sequence[Message], settings: Mapping[str, Any], figures: Figures) -> Iterator[Piece]:
        """As Speaker's. Ctrl-C is heard between two steps of the scheduler; a second one at once."""
        import signal

        from pegboard.core.interfaces.client import GenerateRequest, failure
        from pegboard.toolkit.chat.thinking import effort_hints
        from pegboard.tools.signals import Signals

        plain = dict(settings)
        prompt = self._interlocutor.prompt(messages, effort_hints(plain.pop("reasoning_effort", None)))
        sampling = self._interlocutor.sampling(sampling_params(plain))
        reader = self._interlocutor.reader(prompt, sampling)
        with Signals(signal.SIGINT) as signals:
            signals.gentle()
            request = GenerateRequest(prompt=prompt, sampling=sampling, stream=True, add_special_tokens=False)
            rid = self._engine.submit(request)
            try:
                reason = None
                while reason is None:
                    for chunk in self._engine.poll():
                        reason = chunk.finish_reason
                        _note(figures, chunk)
                        if (error := failure(reason)) is not None:
                            raise error
                        events = reader.feed(chunk.text) if chunk.text else []
                        yield from _pieces(events if reason is None else [*events, *reader.finish()])
                    if signals.stopped:
                        raise KeyboardInterrupt
            finally:
                self._engine.abort(rid)

    def close(self) -> None:
        self._engine.close()


def sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    """Return settings of a chat as sampling parameters, checked. Raises InvalidRequest, with the setting's name."""
    import msgspec

    from pegboard.core.interfaces.sampling import SamplingParams

    values = {name: value for name, value in settings.items() if name not in ("max_tokens", "reasoning_effort")}
    # Without a limit an answer may fill the context, unless the model has a default.
    limit = {"max_new_tokens": settings["max_tokens"]} if settings.get("max_tokens") else {}
    params = SamplingParams.of({**values, **limit})
    params = params if limit else msgspec.structs.replace(params, max_new_tokens=None)
    try:
        params.validate()
    except InvalidRequest as error:
        message = error.message.replace("max_new_tokens", "max_tokens")
        raise InvalidRequest(message, param=error.param, code=error.code) from None
    return params


def _note(figures: Figures, chunk: OutputChunk) -> None:
    figures.prompt_tokens, figures.cached_tokens = chunk.prompt_tokens, chunk.cached_tokens
    figures.completion_tokens = chunk.completion_tokens
    figures.finish_reason = str((chunk.finish_reason or {}).get("type", ""))
    figures.tick(len(chunk.token_ids))


def _pieces(events: Sequence[Any]) -> Iterator[Piece]:
    from pegboard.toolkit.parsing.output_parser import Reasoning

    for event in events:
        if event.text:
            yield Piece(event.text, isinstance(event, Reasoning))


class ServerSpeaker:
    """A server. What it says of tokens comes at the end of an answer."""

    def __init__(self, client: ServerClient, model: str) -> None:
        self._client = client
        self.name = model

    def answer(self, messages: Sequence[Message], settings: Mapping[str, Any], figures: Figures) -> Iterator[Piece]:
        """As Speaker's. The connection ends with the answer, which tells the server that its reader has gone."""
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **settings,
        }
        figures.exact = False
        for event in self._client.events("/v1/chat/completions", body):
            error = event.get("error")
            if error is not None:
                raise _told(error)
            if isinstance(usage := event.get("usage"), dict):
                figures.exact = True
                figures.prompt_tokens = int(usage.get("prompt_tokens") or 0)
                figures.completion_tokens = int(usage.get("completion_tokens") or 0)
                details = usage.get("prompt_tokens_details") or {}
                figures.cached_tokens = int(details.get("cached_tokens") or 0)
            for choice in event.get("choices") or ():
                yield from self._choice(choice, figures)

    def _choice(self, choice: Mapping[str, Any], figures: Figures) -> Iterator[Piece]:
        figures.finish_reason = choice.get("finish_reason") or figures.finish_reason
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        for text, reasoning in ((thought, True), (delta.get("content"), False)):
            if text:
                if not figures.exact:
                    figures.completion_tokens += 1
                figures.tick(1)
                yield Piece(str(text), reasoning)

    def close(self) -> None:
        """There is nothing to close: every question has a connection of its own."""


def _told(error: Any) -> PegboardError:
    if not isinstance(error, dict):
        return PegboardError(f"the server failed: {error}")
    return InvalidRequest(str(error.get("message", error)), code=str(error.get("code") or "engine_failed"))
