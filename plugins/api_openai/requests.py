"""Bodies of the OpenAI-compatible routes."""

from __future__ import annotations

import re
import uuid
from typing import Any

from pegboard.core.interfaces.client import GenerateRequest
from pegboard.core.interfaces.errors import InvalidRequest
from pegboard.core.toolkit.generation import MAX_REQUESTS, SamplingFields, salt_of
from pegboard.core.toolkit.http import RequestModel

MAX_TOP_LOGPROBS = 20
MAX_N = 128
COMPLETION_MAX_TOKENS = 16
"""What OpenAI's completions generate when nobody says how much."""

_RESERVED = frozenset({
    "messages", "tools", "documents", "template", "chat_template", "tokenize",
    "add_generation_prompt", "continue_final_message",
})  # fmt: skip
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


class StreamOptions(RequestModel):
    """`stream_options`."""

    include_usage: bool = False


class CommonBody(SamplingFields):
    """What chat and text completions share: OpenAI's fields, and the field's usual extras."""

    model: str = ""
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str = ""
    min_tokens: int = 0
    rid: str = ""
    cache_salt: str = ""
    extra_key: str = ""
    priority: int = 0
    params: dict[str, Any] = {}
    """What the request says to plugins that act on requests (admission gates), by provider name."""
    response_format: dict[str, Any] = {}
    regex: Any = None
    ebnf: Any = None
    lora_path: Any = None
    session_params: Any = None
    return_hidden_states: bool = False

    def check(self, prompts: int = 1) -> None:
        """Raise InvalidRequest for what is impossible, or would change the answer and is not supported."""
        if not 1 <= self.n <= MAX_N:
            raise InvalidRequest(f"n must be from 1 to {MAX_N}, got {self.n}", param="n")
        if prompts * self.n > MAX_REQUESTS:
            raise InvalidRequest(f"prompts times n must be at most {MAX_REQUESTS}", param="n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is for requests with stream: true", param="stream_options")
        kind = self.response_format.get("type", "text")
        if kind != "text":
            raise InvalidRequest(f"response_format {kind!r} is not supported by this server", param="response_format")
        for name in ("regex", "ebnf", "lora_path", "session_params", "return_hidden_states"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} is not supported by this server", param=name)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def engine_requests(
        self,
        prompts: list[str | list[int]],
        *,
        rid: str,
        max_new_tokens: int | None,
        logprobs: int | None,
        add_special_tokens: bool,
    ) -> list[GenerateRequest]:
        """Prompts times `n`, prompt by prompt. The requests of one HTTP request are called ``<rid>_<number>``."""
        if max_new_tokens is not None and max_new_tokens < 0:
            raise InvalidRequest(f"max_tokens must be at least 0, got {max_new_tokens}", param="max_tokens")
        total = len(prompts) * self.n
        salt = salt_of(self.cache_salt, self.extra_key)
        return [
            GenerateRequest(
                prompt=prompt,
                sampling=self.sampling_params(
                    max_new_tokens=max_new_tokens, min_new_tokens=self.min_tokens, answer=answer
                ),
                rid=rid if total == 1 else f"{rid}_{i * self.n + answer}",
                stream=self.stream,
                priority=self.priority,
                cache_salt=salt,
                logprobs=logprobs,
                add_special_tokens=add_special_tokens,
                params=self.params,
            )
            for i, prompt in enumerate(prompts)
            for answer in range(self.n)
        ]


class ChatBody(CommonBody):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[Any] = []
    functions: list[Any] = []
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def check(self, prompts: int = 1) -> None:
        super().check(prompts)
        if not self.messages:
            raise InvalidRequest("messages is empty", param="messages")
        if self.tools or self.functions:
            raise InvalidRequest("tools are not supported by this server", param="tools")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        _check_logprobs("top_logprobs", self.top_logprobs)

    @property
    def limit(self) -> int | None:
        """None generates until the context is full."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as templates read them: text parts joined by a line break."""
        return [_message(i, message) for i, message in enumerate(self.messages)]

    def template_kwargs(self) -> dict[str, Any]:
        """What else reaches the template: plain names only, and none that the request's own fields set."""
        for name in self.chat_template_kwargs:
            if not _NAME.fullmatch(name) or name in _RESERVED:
                raise InvalidRequest(f"chat_template_kwargs may not set {name[:64]!r}", param="chat_template_kwargs")
        kwargs: dict[str, Any] = {"add_generation_prompt": self.add_generation_prompt}
        if self.continue_final_message:
            kwargs = {"add_generation_prompt": False, "continue_final_message": True}
        return {**self.chat_template_kwargs, **kwargs}


class CompletionBody(CommonBody):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    suffix: str = ""
    best_of: int | None = None

    def check(self, prompts: int = 1) -> None:
        super().check(len(self.prompts()))
        if self.suffix:
            raise InvalidRequest("suffix is not supported by this server", param="suffix")
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest("best_of other than n is not supported by this server", param="best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo with logprobs is not supported yet", param="echo")
        _check_logprobs("logprobs", self.logprobs or 0)

    @property
    def limit(self) -> int:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one unless `prompt` is a list of texts or of lists."""
        prompt: Any = self.prompt
        if not prompt:
            raise InvalidRequest("prompt is empty", param="prompt")
        return list(prompt) if isinstance(prompt, list) and isinstance(prompt[0], (str, list)) else [prompt]


def new_id(prefix: str, rid: str) -> str:
    """The response's id, which aborts the request: the caller's own, or a new one."""
    return rid or f"{prefix}-{uuid.uuid4().hex}"


def _check_logprobs(name: str, value: int) -> None:
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"{name} must be from 0 to {MAX_TOP_LOGPROBS}, got {value}", param=name)


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages.{index}"
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequest(f"{where}.role must be a string", param=f"{where}.role")
    content = message.get("content")
    if content is None:
        content = ""
    if isinstance(content, list):
        content = "\n".join(_part(f"{where}.content.{i}", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    return {**message, "content": content}


def _part(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise InvalidRequest(f"{where}: this model reads text parts only, got {str(kind)[:64]!r}", param=where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", param=f"{where}.text")
    return str(part["text"])
