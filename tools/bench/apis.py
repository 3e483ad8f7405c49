"""The protocols that servers speak: how a prompt is asked, and how the events of its answer are read."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from pegboard.tools.bench.connection import RequestFailed
from pegboard.tools.bench.events import EventSplitter
from pegboard.tools.bench.records import Record

Prompt = list[int] | str | list[dict[str, Any]]
"""Token ids, text, or messages."""

MAX_ERROR_BYTES = 4096
DONE = b"[DONE]"
ABORTED = ("abort", "error")
"""Reasons of an end that is not an answer."""


class _Struct(msgspec.Struct, gc=False):
    pass


class _PromptDetails(_Struct):
    cached_tokens: int | None = None


class _Usage(_Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(_Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(_Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(_Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Reason(_Struct):
    type: str = ""
    message: str | None = None


class _Meta(_Struct):
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: _Reason | None = None


class _Growing(_Struct):
    meta_info: _Meta | None = None
    error: Any = None


class _GrowingKept(_Growing):
    output_ids: list[int] = []
    text: str = ""


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_growing = msgspec.json.Decoder(_Growing).decode
_decode_kept = msgspec.json.Decoder(_GrowingKept).decode


@dataclass(slots=True)
class Wanted:
    """What every request of a run asks for, beside its prompt and its length."""

    model: str = ""
    temperature: float = 0.0
    ignore_eos: bool = True
    stream_usage: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the body."""


class StreamReader(abc.ABC):
    """Reads one answer into a record. `keep`: whether what was said is wanted afterwards."""

    def __init__(self, record: Record, *, keep: bool = False) -> None:
        self.record = record
        self.text: list[str] = []
        self.ids: list[int] = []
        self._keep = keep
        self._splitter = EventSplitter()
        self._plain = bytearray()
        self._streams = False
        self._ended = False

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.record.status = status
        self._streams = status == 200 and headers.get("content-type", "").startswith("text/event-stream")

    def body(self, data: bytes, now: float) -> None:
        if not self._streams:
            if len(self._plain) < MAX_ERROR_BYTES:
                self._plain += data
            return
        for event in self._splitter.feed(data):
            if event == DONE:
                self._ended = True
                continue
            try:
                self.event(event, now)
            except msgspec.MsgspecError as error:
                raise RequestFailed(f"an event cannot be read: {error}: {event[:100]!r}") from None

    def finish(self) -> None:
        """End the answer. Raises RequestFailed where it is none."""
        record = self.record
        if not self._streams:
            what = error_text(bytes(self._plain)) if record.status != 200 else "the answer is not an event stream"
            raise RequestFailed(f"status {record.status}: {what}")
        if not record.end or not (record.finish_reason or self._ended):
            raise RequestFailed("the stream ended before the answer did")
        if record.finish_reason in ABORTED:
            raise RequestFailed(f"the server ended the answer: {record.finish_reason}")
        if not record.counted:
            at_limit = record.finish_reason == "length" and record.output_len > 0
            record.counted = "limit" if at_limit else "chunks"
            record.output_tokens = record.output_len if at_limit else len(record.times)

    @abc.abstractmethod
    def event(self, data: bytes, now: float) -> None:
        """One event; `now` is when it came."""


class _OpenAIReader(StreamReader):
    def event(self, data: bytes, now: float) -> None:
        chunk, record = _decode_chunk(data), self.record
        for choice in chunk.choices:
            text = choice.text
            delta = choice.delta
            if delta is not None:
                text = delta.content or delta.reasoning_content or delta.reasoning
                if text is None and delta.tool_calls:
                    text = " "
            if text:
                record.times.append(now)
                record.end = now
                if self._keep:
                    self.text.append(text)
            if choice.finish_reason:
                record.finish_reason = choice.finish_reason
                record.end = now
        usage = chunk.usage
        if usage is not None:
            record.prompt_tokens = usage.prompt_tokens
            if usage.completion_tokens is not None:
                record.output_tokens, record.counted = usage.completion_tokens, "usage"
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if chunk.error is not None:
            raise RequestFailed(error_text(data))


class _NativeReader(StreamReader):
    def __init__(self, record: Record, *, keep: bool = False) -> None:
        super().__init__(record, keep=keep)
        record.counts = []
        self._decode = _decode_kept if keep else _decode_growing

    def event(self, data: bytes, now: float) -> None:
        grown, record = self._decode(data), self.record
        meta = grown.meta_info
        if grown.error is not None or meta is None:
            raise RequestFailed(error_text(data))
        new = meta.completion_tokens - record.output_tokens
        if new > 0:
            record.times.append(now)
            assert record.counts is not None
            record.counts.append(new)
            record.end = now
        record.output_tokens, record.counted = meta.completion_tokens, "usage"
        record.prompt_tokens, record.cached_tokens = meta.prompt_tokens, meta.cached_tokens
        if meta.finish_reason is not None:
            record.finish_reason = meta.finish_reason.type
            record.end = now
            if meta.finish_reason.type in ABORTED and meta.finish_reason.message:
                raise RequestFailed(meta.finish_reason.message)
        if isinstance(grown, _GrowingKept):
            self.ids, self.text = grown.output_ids, [grown.text]


class Api(abc.ABC):
    """One way of asking."""

    name: ClassVar[str]
    path: ClassVar[str]
    reader: ClassVar[type[StreamReader]]
    kinds: ClassVar[tuple[str, ...]]
    """The kinds of prompts that it takes: tokens, text, messages; the usual one first."""
    tells_ids: ClassVar[bool] = False
    """Whether answers have token ids."""

    @abc.abstractmethod
    def body(self, prompt: Prompt, output_len: int, wanted: Wanted) -> dict[str, Any]:
        """Return the request's body."""

    def encode(self, prompt: Prompt, output_len: int, wanted: Wanted) -> bytes:
        """`body`, with the further fields that are wanted, as JSON."""
        body = self.body(prompt, output_len, wanted)
        for key, value in wanted.extra.items():
            inner = body.get(key)
            body[key] = {**inner, **value} if isinstance(inner, dict) and isinstance(value, Mapping) else value
        return msgspec.json.encode(body)


class _OpenAI(Api):
    reader = _OpenAIReader

    def _common(self, output_len: int, wanted: Wanted) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": wanted.model,
            "max_tokens": output_len,
            "temperature": wanted.temperature,
            "stream": True,
        }
        if wanted.stream_usage:
            body["stream_options"] = {"include_usage": True}
        if wanted.ignore_eos:
            body["ignore_eos"] = True
        return body


class Completions(_OpenAI):
    """OpenAI's text completions, whose prompts may be token ids."""

    name = "openai"
    path = "/v1/completions"
    kinds = ("tokens", "text")

    def body(self, prompt: Prompt, output_len: int, wanted: Wanted) -> dict[str, Any]:
        return {"prompt": prompt, **self._common(output_len, wanted)}


class Chat(_OpenAI):
    """OpenAI's chat completions."""

    name = "openai-chat"
    path = "/v1/chat/completions"
    kinds = ("messages",)

    def body(self, prompt: Prompt, output_len: int, wanted: Wanted) -> dict[str, Any]:
        return {"messages": prompt, **self._common(output_len, wanted)}


class Native(Api):
    """Pegboard's own route, and SGLang's: every event has the whole answer so far, and says how many tokens that is."""

    name = "native"
    path = "/generate"
    reader = _NativeReader
    kinds = ("tokens", "text")
    tells_ids = True

    def body(self, prompt: Prompt, output_len: int, wanted: Wanted) -> dict[str, Any]:
        sampling: dict[str, Any] = {"max_new_tokens": output_len, "temperature": wanted.temperature}
        if wanted.ignore_eos:
            sampling["ignore_eos"] = True
        return {"text" if isinstance(prompt, str) else "input_ids": prompt, "sampling_params": sampling, "stream": True}


APIS: dict[str, Api] = {one.name: one for one in (Completions(), Chat(), Native())}


def error_text(data: bytes) -> str:
    """Return what an error's body says, in one line."""
    try:
        said = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        return " ".join(data.decode("utf-8", "replace").split())[:300]
    for key in ("error", "detail", "message"):
        if isinstance(said, dict) and said.get(key):
            said = said[key]
    return " ".join((said if isinstance(said, str) else str(said)).split())[:300]
