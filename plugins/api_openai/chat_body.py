"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Literal

from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.plugins.api_openai.fields import CommonBody, check_top
from pegboard.plugins.api_openai.unsupported import CHAT, CHAT_WITH_MEDIA
from pegboard.toolkit.chat.thinking import effort_hints
from pegboard.toolkit.http.bodies import RequestModel
from pegboard.toolkit.http.media_fields import common_settings
from pegboard.toolkit.media.inputs import MediaSettings

_REFUSED = ("functions", "function_call", "audio", "web_search_options", "chat_template", "documents")
_INSTEAD = {
    "functions": "; use tools",
    "function_call": "; use tool_choice",
    "chat_template": "; the model's own is used",
}


class ThinkingSwitch(RequestModel):
    """`thinking`, as clients of other servers switch it."""

    type: Literal["enabled", "disabled"]
    budget_tokens: int | None = None
    """As `thinking_token_budget`, where this server can end thoughts."""


class ChatBody(CommonBody):
    """Body of `/v1/chat/completions`."""

    refused = CHAT

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking: ThinkingSwitch | None = None
    """Whether the chat template is to ask for thinking, whatever the effort."""
    thinking_token_budget: int | None = None
    """Most tokens of thinking, after which it is ended."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """Reaches chat templates that read such a thing."""
    separate_reasoning: bool = True
    """Whether the model's thinking is given as `reasoning_content`, apart from the content."""
    stream_reasoning: bool = True
    """Whether a stream has the thinking piece by piece, and not as a whole when it is over."""
    chat_template_kwargs: dict[str, Any] = {}
    """What else the chat template gets to read: names that it knows."""
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    """Whether the tokenizer's special tokens go around what the template wrote, which has them by itself as a rule."""
    continue_final_message: bool = False
    """Whether the answer goes on with the last message."""
    modalities: list[str] = []
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    documents: Any = None

    def check(self, prompts: int = 1) -> None:
        """As CommonBody's."""
        for name in _REFUSED:
            if getattr(self, name):
                text = f"{name} is not supported by this server{_INSTEAD.get(name, '')}"
                raise InvalidRequest(text, param=name, code="unsupported")
        if any(one != "text" for one in self.modalities):
            raise InvalidRequest("modalities: this model writes text only", param="modalities", code="unsupported")
        super().check(prompts)
        if (self.max_completion_tokens or 0) < 0:
            raise InvalidRequest(
                f"max_completion_tokens must be at least 0, got {self.max_completion_tokens}",
                param="max_completion_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        check_top("top_logprobs", self.top_logprobs)
        if self.continue_final_message and self.messages and self.messages[-1].get("role") != "assistant":
            raise InvalidRequest(
                "continue_final_message needs a last message of the assistant's", param="continue_final_message"
            )

    @property
    def top_wanted(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """How many tokens to generate; None until the context is full."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_hints(self) -> dict[str, object]:
        """Return what else the template is told, if it reads such a thing."""
        hints = effort_hints(self.reasoning_effort)
        if self.thinking is not None:
            hints["enable_thinking"] = self.thinking.type == "enabled"
        return {**hints, "verbosity": self.verbosity} if self.verbosity else hints

    @property
    def names(self) -> dict[str, str]:
        """What the engine's fields are called here."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {
            "prompt": "messages",
            "max_new_tokens": limit,
            "min_new_tokens": "min_tokens",
            "logprobs": "top_logprobs",
            "logprob_start": "prompt_logprobs",
        }

    @property
    def media_settings(self) -> MediaSettings:
        """What holds for all media of the messages. Raises InvalidRequest for what is wrong."""
        return MediaSettings()


class MediaChatBody(ChatBody):
    """Body of `/v1/chat/completions` for a model that takes pictures or video."""

    refused = CHAT_WITH_MEDIA

    mm_processor_kwargs: object = None
    """How pictures and video are read, by vLLM's name: `min_pixels`, `max_pixels`, `fps` and `num_frames`. A part of a
    message may say the same of its own."""

    @property
    def media_settings(self) -> MediaSettings:
        return common_settings(self.mm_processor_kwargs)
