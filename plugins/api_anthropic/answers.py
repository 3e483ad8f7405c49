"""What answers look like, for the documents of the routes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class TokenCount(BaseModel):
    """Tokens that a conversation has as a prompt."""

    input_tokens: int


class TextBlock(BaseModel):
    """Text for the user."""

    type: Literal["text"]
    text: str


class ThinkingBlock(BaseModel):
    """The model's thinking."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    """A call of one of the request's tools."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class Usage(BaseModel):
    """Tokens; `input_tokens` without those that were cached."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(BaseModel):
    """The model's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: Usage
