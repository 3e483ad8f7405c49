"""Who answers in ``pegboard chat``: an engine in this process, or a server."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pegboard.core.interfaces.errors import InvalidRequest, PegboardError

if TYPE_CHECKING:
    from pegboard.core.engine import Engine

Message = dict[str, Any]

TIMEOUT = 600.0
"""Seconds without a byte after which a server counts as gone."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of an answer, or of the thinking before it."""

    text: str
    reasoning: bool = False


@dataclass(slots=True)
class Figures:
    """What an answer took; seconds from the question on."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    first: float = 0.0
    seconds: float = 0.0
    finish_reason: str = ""

    def __str__(self) -> str:
        writing = max(self.seconds - self.first, 1e-9)
        rate = f", {(self.new_tokens - 1) / writing:.1f} tok/s" if self.new_tokens > 1 else ""
        return (
            f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached), {self.new_tokens} new, "
            f"first after {self.first:.2f} s{rate}"
        )


@dataclass(slots=True)
class Answer:
    """One answer on its way: iterate it; `figures` are complete at the end. Closing it early aborts it."""

    pieces: Iterator[Piece]
    figures: Figures = field(default_factory=Figures)


class Speaker(Protocol):
    """Answers conversations."""

    name: str

    def answer(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Answer:
        """`params` are temperature, top_p, top_k, seed and max_tokens, where they are set. Raises PegboardError, now or
        while the answer is read.
        """

    def close(self) -> None: ...


class EngineSpeaker:
    """An engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = engine.info.served_name

    def answer(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Answer:
        figures = Figures()
        return Answer(self._pieces(messages, dict(params), figures), figures)

    def _pieces(self, messages: Sequence[Message], params: dict[str, Any], figures: Figures) -> Iterator[Piece]:
        from pegboard.core.interfaces.sampling import SamplingParams

        started = time.monotonic()
        text = self._engine.tokenizer.apply_chat_template(messages)
        sampling = SamplingParams(max_new_tokens=params.pop("max_tokens", None), **params)
        stream = self._engine.stream(text, sampling, add_special_tokens=False)
        with contextlib.closing(stream):  # type: ignore[type-var]  # it is a generator
            for chunk in stream:
                figures.first = figures.first or time.monotonic() - started
                figures.prompt_tokens, figures.cached_tokens = chunk.prompt_tokens, chunk.cached_tokens
                figures.new_tokens = chunk.completion_tokens
                figures.seconds = time.monotonic() - started
                if chunk.finish_reason is not None:
                    figures.finish_reason = str(chunk.finish_reason.get("type", ""))
                if chunk.text:
                    yield Piece(chunk.text)

    def close(self) -> None:
        self._engine.close()


class ServerSpeaker:
    """A server with OpenAI's chat completions."""

    def __init__(self, url: str, api_key: str = "", model: str = "") -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PegboardError(f"--url: {url!r} is no address such as http://127.0.0.1:30000")
        self._parts = parts
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self.name = model or self._first_model()

    def answer(self, messages: Sequence[Message], params: Mapping[str, Any]) -> Answer:
        figures = Figures()
        return Answer(self._pieces(messages, params, figures), figures)

    def close(self) -> None:
        pass

    def _first_model(self) -> str:
        with self._request("GET", "/v1/models", None) as response:
            models = json.loads(response.read()).get("data") or [{}]
        return str(models[0].get("id", ""))

    def _pieces(self, messages: Sequence[Message], params: Mapping[str, Any], figures: Figures) -> Iterator[Piece]:
        started = time.monotonic()
        body = {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **params,
        }
        with self._request("POST", "/v1/chat/completions", body) as response:
            for data in _events(response):
                _raise_error(data)
                usage = data.get("usage")
                if usage:
                    figures.prompt_tokens = usage.get("prompt_tokens", 0)
                    figures.new_tokens = usage.get("completion_tokens", 0)
                    figures.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                for choice in data.get("choices", ()):
                    delta = choice.get("delta") or {}
                    figures.finish_reason = choice.get("finish_reason") or figures.finish_reason
                    for key, reasoning in (("reasoning_content", True), ("content", False)):
                        if delta.get(key):
                            figures.first = figures.first or time.monotonic() - started
                            yield Piece(delta[key], reasoning)
                figures.seconds = time.monotonic() - started

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        """An answer with a good status. The connection is closed afterwards, which ends what the server was doing."""
        parts = self._parts
        host, port = str(parts.hostname), parts.port
        connection = (
            http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=ssl.create_default_context())
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=TIMEOUT)
        )
        try:
            try:
                data = None if body is None else json.dumps(body).encode()
                connection.request(method, self._base + path, body=data, headers=self._headers)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                where = f"{parts.scheme}://{parts.netloc}"
                raise PegboardError(f"{where} does not answer: {str(error) or type(error).__name__}") from None
            if response.status != 200:
                raise _refusal(response.status, response.read())
            yield response
        finally:
            connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The data of server-sent events, up to [DONE]."""
    try:
        for raw in response:
            line = raw.strip()
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise PegboardError(f"the server broke off: {str(error) or type(error).__name__}") from None


def _raise_error(data: Mapping[str, Any]) -> None:
    if "error" in data:
        error = data["error"]
        raise InvalidRequest(str(error.get("message", error)), code=str(error.get("code") or "engine_failed"))


def _refusal(status: int, body: bytes) -> PegboardError:
    try:
        error = json.loads(body)["error"]
        message, code = str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError):
        message, code = f"the server answered with status {status}", ""
    if status == 401:
        message += " (--api-key, or the environment's PEGBOARD_API_KEY)"
    return InvalidRequest(message, code=code, status=status)
