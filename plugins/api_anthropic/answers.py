"""What answers look like, for the documents of the routes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class TokenCount(BaseModel):
    """Tokens that a conversation has as a prompt."""

    input_tokens: int


class ModelCard(BaseModel):
    """One model. `max_tokens` is null: an answer may be as long as the context leaves room for."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: None


class ModelPage(BaseModel):
    """A page of models, from `first_id` to `last_id`; both null where it is empty."""

    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None


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
