"""The body of `/v1/responses`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.fields import check_top
from pegboard.plugins.api_openai.formats import asked_format
from pegboard.plugins.api_openai.unsupported import RESPONSES, RESPONSES_WITH_MEDIA
from pegboard.toolkit.grammars.grammar import grammar_of
from pegboard.toolkit.http.bodies import RequestModel
from pegboard.toolkit.http.generation import SamplingFields
from pegboard.toolkit.http.media_fields import common_settings
from pegboard.toolkit.http.refusals import RefusingModel
from pegboard.toolkit.http.request_fields import RequestFields
from pegboard.toolkit.media.inputs import MediaSettings

if TYPE_CHECKING:
    from pegboard.core.interfaces.sampling import Grammar

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
NAMES = {"prompt": "input", "max_new_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
"""What the engine's fields are called here."""

GRAMMARS: dict[str, str] = {"json_schema": "text.format.schema", "json_object": "text.format"}
"""What grammars are called here."""

_REFUSED = ("background", "conversation", "prompt", "context_management", "moderation")
_INCLUDED = frozenset({LOGPROBS, "reasoning.encrypted_content"})


class ReasoningOptions(RequestModel):
    """`reasoning`."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Taken and not followed: the thinking is given as it is."""


class TextOptions(RequestModel):
    """`text`."""

    format: dict[str, Any] = {}
    """`{"type": "text" | "json_object" | "json_schema", "name": ..., "schema": {...}}`."""
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseBody(RequestFields, SamplingFields, RefusingModel):
    """Body of `/v1/responses`."""

    refused = RESPONSES

    model: str = ""
    input: str | list[dict[str, Any]]
    instructions: str = ""
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    stream: bool = False
    store: bool = True
    """Whether the answer is kept, for `previous_response_id` and to be fetched again."""
    previous_response_id: str = ""
    include: list[str] = []
    top_logprobs: int = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: dict[str, str] = {}
    user: str = ""
    chat_template_kwargs: dict[str, Any] = {}
    """What else the chat template gets to read: names that it knows."""
    thinking_token_budget: int | None = None
    background: bool = False
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None

    def check(self) -> None:
        """Raise InvalidRequest for what is impossible, or would change the answer and is not supported."""
        for name in _REFUSED:
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not supported by this server", param=name, code="unsupported")
        if self.truncation != "disabled":
            raise InvalidRequest(
                "truncation: this server leaves nothing of a conversation out", param="truncation", code="unsupported"
            )
        for name in self.include:
            if name not in _INCLUDED:
                raise InvalidRequest(f"include: {name[:64]!r} is not supported by this server", param="include")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise InvalidRequest(
                f"max_output_tokens must be at least 1, got {self.max_output_tokens}", param="max_output_tokens"
            )
        if len(self.metadata) > MAX_METADATA:
            raise InvalidRequest(f"metadata may have at most {MAX_METADATA} entries", param="metadata")
        check_top("top_logprobs", self.top_logprobs)

    @property
    def logprobs(self) -> int | None:
        """How many of the largest logprobs to give beside each token's own; None for none at all."""
        return self.top_logprobs if self.top_logprobs or LOGPROBS in self.include else None

    def grammar(self) -> Grammar | None:
        """Return what the answer must look like, by `text.format`."""
        asked = asked_format(self.text.format, "text.format", flat=True)
        return None if asked is None else grammar_of(**{asked.kind: asked.value}, names={asked.kind: asked.name})

    @property
    def media_settings(self) -> MediaSettings:
        """What holds for all media of the input. Raises InvalidRequest for what is wrong."""
        return MediaSettings()


class MediaResponseBody(ResponseBody):
    """Body of `/v1/responses` for a model that takes pictures or video."""

    refused = RESPONSES_WITH_MEDIA

    mm_processor_kwargs: object = None
    """How pictures and video are read, by vLLM's name: `min_pixels`, `max_pixels`, `fps` and `num_frames`. A part of an
    item may say the same of its own."""

    @property
    def media_settings(self) -> MediaSettings:
        return common_settings(self.mm_processor_kwargs)


class CountBody(ResponseBody):
    """Body of `/v1/responses/input_tokens`: what a response would be asked with."""


class MediaCountBody(MediaResponseBody):
    """Body of `/v1/responses/input_tokens` for a model that takes pictures or video."""
