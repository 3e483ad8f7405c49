"""Answers of /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from pegboard.plugins.api_openai.completions import PromptLogprob
from pegboard.plugins.api_openai.logprobs import chat_logprobs
from pegboard.plugins.api_openai.usage import Usage
from pegboard.plugins.api_openai.writer import Choice, Writer, ending
from pegboard.toolkit.parsing.output_parser import Content, OutputEvent, Reasoning, ToolCallArguments, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pegboard.core.interfaces.client import Logprob, OutputChunk
    from pegboard.plugins.api_openai.chat_body import ChatBody
    from pegboard.plugins.api_openai.surface import Surface
    from pegboard.toolkit.chat.tool_calls import ChatStream, ToolCall
    from pegboard.toolkit.chat.turn import Turn
    from pegboard.toolkit.http.generation import Answer


class ChatWriter(Writer):
    """Bodies of `/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    wanted: ChatBody

    def __init__(
        self, surface: Surface, rid: str, body: ChatBody, turn: Turn, prompt_ids: Sequence[list[int]] | None = None
    ) -> None:
        super().__init__(surface, rid, body, prompt_ids)
        # The turn itself may hold its prompt's pictures.
        self._thinks = turn.reasoning_parser is not None
        self._streams = [turn.stream(stream_reasoning=body.stream_reasoning) for _ in range(body.n)]
        self._fed: list[OutputEvent] | None = None
        """What `plain` has read of a chunk that turned out not to be."""

    def choice(self, index: int, answer: Answer) -> Choice:
        said = self._streams[index].collect(answer.text)
        message: dict[str, object] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["content"] = said.content or None
            message["tool_calls"] = [_whole_call(one) for one in said.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.logprobs),
            **self._ending(index, answer.finish_reason),
            **self.extras(answer),
        }

    def opening(self) -> dict[str, object]:
        return {} if self.prompt_ids is None else {"prompt_token_ids": self.prompt_ids[0]}

    def begin(self, index: int) -> list[Choice]:
        return [self._delta(index, {"role": "assistant", "content": "", "refusal": None})]

    def pieces(self, index: int, chunk: OutputChunk) -> list[Choice]:
        stream = self._streams[index]
        fed, self._fed = self._fed, None
        events = fed if fed is not None else stream.feed(chunk.text) if chunk.text else []
        if chunk.finish_reason is not None:
            events += stream.finish()
        found = [self._delta(index, _delta(stream, event)) for event in events]
        wanted = self._logprobs(chunk.logprobs or []) if chunk.logprobs else None
        ids = chunk.token_ids if self.wanted.return_token_ids else []
        if wanted is not None or ids or (self.wanted.return_hidden_states and chunk.hidden_states):
            # They are of tokens, whether or not these are text already.
            found = found or [self._delta(index, {})]
            found[0]["logprobs"] = wanted
            if ids:
                found[0]["token_ids"] = ids
            if self.wanted.return_hidden_states:
                found[0]["hidden_states"] = chunk.hidden_states
        if chunk.finish_reason is not None:
            found.append({**self._delta(index, {}), **self._ending(index, chunk.finish_reason)})
        if chunk.extra:
            found = found or [self._delta(index, {})]
            found[-1]["extra"] = chunk.extra
        return found

    def plain(self, index: int, chunk: OutputChunk) -> str | None:
        wanted = self.wanted
        by_token = wanted.logprobs or wanted.return_hidden_states or wanted.return_token_ids
        if chunk.finish_reason is not None or chunk.extra or by_token:
            return None
        events = self._streams[index].feed(chunk.text) if chunk.text else []
        if not events:
            return ""
        if len(events) == 1 and isinstance(events[0], Content):
            return events[0].text
        self._fed = events
        return None

    def piece(self, index: int, text: str) -> Choice:
        return self._delta(index, {"content": text})

    def reasoning_tokens(self) -> int | None:
        if not self._thinks:
            return None
        # The engine does not know which are which. The same text has the same tokens but where it was cut.
        encode = self.surface.client.tokenizer.encode
        thoughts = [one.answer().reasoning for one in self._streams]
        return sum(len(encode(text, add_special_tokens=False)) for text in thoughts if text)

    def _delta(self, index: int, delta: dict[str, object]) -> Choice:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _ending(self, index: int, reason: dict[str, object] | None) -> Choice:
        found = ending(reason)
        if found["finish_reason"] == "stop" and self._streams[index].calls:
            found["finish_reason"] = "tool_calls"
        return found

    def _logprobs(self, entries: Sequence[Logprob]) -> dict[str, object] | None:
        return chat_logprobs(self.texts, entries, self.wanted.top_logprobs) if self.wanted.logprobs else None


def _delta(stream: ChatStream, event: OutputEvent) -> dict[str, object]:
    """Return what an event is in a stream of chunks."""
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, ToolCallStart):
        call = stream.calls[event.index]
        function = {"name": call.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": call.id, "type": "function", "function": function}]}
    if isinstance(event, ToolCallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return {"content": event.text}


def _whole_call(call: ToolCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class TopLogprob(BaseModel):
    """A token and how likely it was; `bytes` are its own, `token` shows them as text."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Logprobs of an answer, token by token."""

    content: list[ChatLogprob] | None
    refusal: list[ChatLogprob] | None


class CalledFunction(BaseModel):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class Call(BaseModel):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    """What the model answered; no content where it only calls tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    matched_stop: int | str | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    hidden_states: list[list[float]] | None = None
    token_ids: list[int] | None = None
    extra: dict[str, object] | None = None


class ChatCompletion(BaseModel):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
