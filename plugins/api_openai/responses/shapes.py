"""The answers of /v1/responses, for the document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from pegboard.plugins.api_openai.chat_answers import ChatLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class OutputMessage(BaseModel):
    """What the model says."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(BaseModel):
    """Thinking, as it was generated."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """What the model thought before."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(BaseModel):
    """A function that the model calls, with its arguments as JSON text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class OutputCustomCall(BaseModel):
    """A custom tool that the model calls, with free text."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str


class InputDetails(BaseModel):
    """Of the input's tokens."""

    cached_tokens: int
    cache_write_tokens: int
    image_tokens: int | None = None
    video_tokens: int | None = None


class OutputDetails(BaseModel):
    """Of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(BaseModel):
    """A response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall | OutputCustomCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class DeletedResponse(BaseModel):
    """Says that a response is forgotten."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(BaseModel):
    """A page of the items that came with a request."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(BaseModel):
    """How many tokens an input has, with the template's own."""

    object: Literal["response.input_tokens"]
    input_tokens: int
